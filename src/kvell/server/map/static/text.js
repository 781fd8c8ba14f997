// Numbers as people read them, and small pieces of the document.

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

const byId = (id) => document.getElementById(id);

function bytes(count) {
  const unit = count > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log2(count) / 10)) : 0;
  const value = count / 1024 ** unit;
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

function percent(part) {
  return part === null ? "–" : `${(100 * part).toFixed(1)} %`;
}

function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function swatch(label, colour) {
  const box = element("span", { className: "swatch", ariaHidden: "true" });
  box.style.backgroundColor = colour;
  const item = element("span", {}, box, label);
  item.setAttribute("role", "listitem");
  return item;
}

// What an instance lends to others or borrows of them, and what creditors wanted back so far.
function sectionsText(sections) {
  const of = (...names) => names.reduce((sum, name) => sum + (sections[name] ?? 0), 0);
  const lent = of("lent") ? `, lends ${count(of("lent"), "section")}` : "";
  const borrowed = of("borrowed") ? `, borrows ${count(of("borrowed"), "section")}` : "";
  const recalled = of("returned", "replaced", "lost");
  return lent + borrowed + (recalled ? `, ${count(recalled, "section")} recalled` : "");
}
