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

function showCommand(event) {
  const form = event.target.closest("form"), code = form?.querySelector("[data-command]");
  if (!code) return;
  const values = new FormData(form);
  const valueOf = (name) => String(values.get(name) || "").trim(), option = code.dataset.option;
  const command = code.dataset.command.replace(/\{(\w+)\}/g, (_, name) => {
    if (name === "columns") {
      const named = [...values].filter(([key, each]) => key.startsWith("column.") && each);
      return quoted(`data.columns={${named.map(([key, each]) => `${key.slice(7)}: ${each}`).join(", ")}}`);
    }
    if (name !== "drop") return quoted(valueOf(name) || code.dataset.empty);
    const drops = values.getAll(name).map((each) => (each === "ROW-UNREADABLE" ? " --drop-bad" : ` --drop=${each}`));
    return [...new Set(drops)].join("");
  });
  code.textContent = command + (valueOf(option) ? ` --${option}=${quoted(valueOf(option))}` : "");
}
document.addEventListener("input", showCommand);
document.addEventListener("change", (event) => {
  showCommand(event);
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

function sent(name, file, before, total, first) {
  return new Promise((done) => {
    const request = new XMLHttpRequest();
    request.open("PUT", `/upload/${name.split("/").map(encodeURIComponent).join("/")}${first}`);
    request.upload.onprogress = (event) => (find("sending").value = (100 * (before + event.loaded)) / (total || 1));
    request.onloadend = () => done([request.status, request.responseText]);
    request.send(file);
  });
}

async function send(files) {
  const seen = files.filter(([name]) => !/(^|\/)\./.test(name)), total = seen.reduce((sum, [, file]) => sum + file.size, 0);
  let before = 0, path = "", folder = "";
  find("sending").hidden = false;
  for (const [name, file] of seen) {
    const rest = name.split("/").slice(1).join("/");
    const place = rest && folder ? `${folder}/${rest}` : name;
    const [status, text] = await sent(place, file, before, total, rest && !folder ? "?first" : "");
    if (status !== 200) {
      tell(text || find("lost").textContent);
      path = "";
      break;
    }
    before += file.size;
    if (rest) folder = text.split("/")[1]; // the server's name for it
    path = folder ? `data/${folder}` : text;
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
document.addEventListener("htmx:error", () => tell(find("lost").textContent));
document.addEventListener("htmx:response:error", (event) => tell(event.detail.ctx.text));
