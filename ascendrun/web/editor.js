// Offers the keys that the schema of job files has at the place of the cursor, and shows what the present key means.
"use strict";
(async () => {
  const editor = document.getElementById("editor"), about = document.getElementById("about");
  const offered = document.getElementById("offered");
  const schema = await (await fetch("/job.schema.json")).json();

  // The object that a schema describes, through references, alternatives and items of lists.
  function within(part) {
    if (!part) return null;
    if (part.$ref) return within(schema.$defs[part.$ref.split("/").pop()]);
    if (part.properties) return part;
    for (const one of part.anyOf || []) { const found = within(one); if (found) return found; }
    return part.items ? within(part.items) : null;
  }

  const indentOf = (line) => line.match(/^ *(- )?/)[0].length;
  const keyOf = (line) => (line.match(/^ *(?:- )?([A-Za-z_]\w*):/) || [])[1];

  // The keys above a line, from the outermost, and the other keys of its block.
  function place(lines, at) {
    const path = [], used = new Set();
    let indent = indentOf(lines[at]);
    for (let y = at - 1; y >= 0 && indent > 0; y--) {
      if (keyOf(lines[y]) && indentOf(lines[y]) < indent) { path.unshift(keyOf(lines[y])); indent = indentOf(lines[y]); }
    }
    lines.forEach((line) => { if (indentOf(line) === indentOf(lines[at]) && keyOf(line)) used.add(keyOf(line)); });
    return { path, used };
  }

  function show() {
    const before = editor.value.slice(0, editor.selectionStart), lines = editor.value.split("\n");
    const at = before.split("\n").length - 1, { path, used } = place(lines, at);
    const block = path.reduce((part, key) => part && within((part.properties || {})[key]), schema);
    const properties = (block && block.properties) || {}, key = keyOf(lines[at]);
    const meaning = (name) => {
      const full = [...path, name].join(".").replace(/^(stages|roles)\./, "$1[].");
      return schema.about[full] || schema.about[full.replace(/^stages\[\]\./, "")] || "";
    };
    about.textContent = key && properties[key] ? `${[...path, key].join(".")}: ${meaning(key)}` : path.join(".");
    const typed = lines[at].trim().replace(/^- /, "");
    const names = Object.keys(properties).filter((name) => !used.has(name) && (key || name.startsWith(typed)));
    offered.replaceChildren(...names.slice(0, 40).map((name) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.title = meaning(name);
      button.addEventListener("click", () => insert(name, at, key));
      return button;
    }));
  }

  // Completes the line of the cursor, or adds a line after it if that has a key.
  function insert(name, at, key) {
    const lines = editor.value.split("\n"), margin = " ".repeat(indentOf(lines[at]));
    if (key) lines.splice(++at, 0, `${margin}${name}: `);
    else lines[at] = `${lines[at].match(/^ *(- )?/)[0]}${name}: `;
    editor.value = lines.join("\n");
    editor.focus();
    editor.selectionStart = editor.selectionEnd = lines.slice(0, at + 1).join("\n").length;
    show();
  }

  for (const name of ["input", "click", "keyup"]) editor.addEventListener(name, show);
  show();
})();
