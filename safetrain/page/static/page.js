// What HTML and htmx do not: sending files, copying a command, keeping it true while a value is typed.
"use strict";
const find = (id) => document.getElementById(id);
const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

if (location.search) history.replaceState(null, "", location.pathname + location.hash);

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.matches(".copy")) {
    navigator.clipboard.writeText(button.previousElementSibling.textContent);
    const label = button.textContent;
    button.textContent = "✓";
    setTimeout(() => (button.textContent = label), 1200);
  }
  if (button?.matches(".close")) button.parentElement.remove();
});

document.addEventListener("input", (event) => {
  const form = event.target.closest("form"), code = form?.querySelector("[data-command]");
  if (!code) return;
  const values = new FormData(form);
  code.textContent = code.dataset.command.replace(/\{(\w+)\}/g, (_, name) => {
    if (name === "columns") {
      const named = [...values].filter(([key, value]) => key.startsWith("column.") && value);
      return quoted(`data.columns={${named.map(([key, value]) => `${key.slice(7)}: ${value}`).join(", ")}}`);
    }
    if (name !== "drop") return quoted(String(values.get(name) || "null"));
    const bad = "ROW-UNREADABLE";
    return values.getAll(name).map((each) => (each === bad ? " --drop-bad" : ` --drop=${each}`)).join("");
  });
});
document.addEventListener("change", (event) => {
  if (event.target.id === "file" || event.target.id === "folder") {
    send([...event.target.files].map((file) => [file.webkitRelativePath || file.name, file]));
    event.target.value = "";
  }
});

// A dropped folder is read entry by entry: there is no list of its files.
async function filesOf(entry, path = "") {
  if (entry.isFile) return [[path + entry.name, await new Promise((done, failed) => entry.file(done, failed))]];
  const reader = entry.createReader(), found = [];
  for (;;) {
    const part = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!part.length) return found;
    for (const each of part) found.push(...(await filesOf(each, `${path}${entry.name}/`)));
  }
}

function sent(name, file, before, total) {
  return new Promise((done) => {
    const request = new XMLHttpRequest();
    request.open("PUT", `/upload/${name.split("/").map(encodeURIComponent).join("/")}`);
    request.upload.onprogress = (event) => (find("sending").value = (100 * (before + event.loaded)) / (total || 1));
    request.onloadend = () => done([request.status, request.responseText]);
    request.send(file);
  });
}

async function send(files) {
  const total = files.reduce((sum, [, file]) => sum + file.size, 0);
  const folder = files[0]?.[0].includes("/") ? `data/${files[0][0].split("/")[0]}` : "";
  let before = 0, path = folder;
  find("sending").hidden = false;
  for (const [name, file] of files.filter(([name]) => !/(^|\/)\./.test(name))) {
    const [status, text] = await sent(name, file, before, total);
    if (status !== 200) {
      tell(text || "—");
      path = "";
      break;
    }
    before += file.size;
    path = folder || text;
  }
  find("sending").hidden = true;
  if (!path) return;
  find("check-path").value = path;
  find("check").requestSubmit();
}

function tell(text) {
  const box = Object.assign(document.createElement("div"), { className: "said bad" });
  box.append(Object.assign(document.createElement("pre"), { textContent: text }));
  find("said").replaceChildren(box);
}

for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, async (event) => {
    event.preventDefault(); // a file dropped beside the box must not replace the page
    find("drop")?.classList.toggle("over", name === "dragover");
    if (name !== "drop") return;
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
    send((await Promise.all(entries.map((entry) => filesOf(entry)))).flat());
  });
}

document.addEventListener("htmx:sse:after:message", () => {
  const said = document.querySelector("[data-title]")?.dataset.title;
  if (said) document.title = `${said} · ${document.body.dataset.project}`;
});
document.addEventListener("htmx:sse:error", () => (find("lost").hidden = false));
document.addEventListener("htmx:sse:after:connection", () => (find("lost").hidden = true));
document.addEventListener("htmx:response:error", (event) => tell(event.detail.ctx.text));
