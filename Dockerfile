# For CI: docker build -t safetrain . && docker run -v "$PWD:/project" safetrain run
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
COPY . /program
RUN pip install --no-cache-dir --constraint /program/constraints.txt "/program[cpu]"
WORKDIR /project
ENTRYPOINT ["safetrain"]
