// Legends: an entry has a colour, a text, and a "?" that opens one sentence.

const HELP = {
  used: "Pages of this layer group that running requests use; a paler cell has fewer of them.",
  cached: "Pages of this layer group that no request uses now. A later prompt with the same "
    + "beginning reuses them; they are evicted when memory is short.",
  withheld: "Memory that running steps need for activations, and that KV pages get back later.",
  empty: "Memory that holds nothing yet.",
  lent: "Pages with sections of another instance's request, which reads them here while it lends.",
  borrowed: "A section of this instance's requests that is stored in the memory of another one.",
  allUsed: "KV memory that running requests use, of all layer groups.",
  allCached: "KV memory that is cached for later prompts, of all layer groups.",
  activations: "Memory of activations, out of the pool that KV cache and activations share.",
  buffer: "Host memory that holds pages which are not in the pool.",
  tokensIn: "Prompt tokens that were prefilled or found cached, per second.",
  tokensOut: "Output tokens that were sent to clients, per second.",
  running: "Requests in the running batches of all instances.",
  waiting: "Requests that wait for an instance, or in an instance for memory.",
};

class Legend {
  constructor(element_) {
    this.element = element_;
    this.element.setAttribute("role", "list");
    this.items = new Map();
  }

  // Entries are {id, label, colour, line, help}; a line is "solid" or "dashed", or absent for areas.
  // An entry that stays is changed in place, since its sentence may be open.
  show(entries) {
    const ids = entries.map((entry) => entry.id);
    for (const [id, item] of this.items) {
      if (!ids.includes(id)) {
        item.box.remove();
        this.items.delete(id);
      }
    }
    for (const entry of entries) {
      if (!this.items.has(entry.id)) this.items.set(entry.id, this.item(entry));
      const item = this.items.get(entry.id);
      setText(item.label, entry.label);
      if (entry.line) item.swatch.style.borderTop = `3px ${entry.line} ${entry.colour}`;
      else item.swatch.style.backgroundColor = entry.colour;
    }
    const boxes = entries.map((entry) => this.items.get(entry.id).box);
    if (boxes.some((box, i) => this.element.children[i] !== box)) {
      this.element.replaceChildren(...boxes);
    }
  }

  item(entry) {
    const kind = entry.line ? "swatch line" : `swatch ${entry.mark ?? ""}`;
    const mark = element("span", { className: kind.trim(), ariaHidden: "true" });
    const label = element("span");
    const why = element("span", { className: "why", textContent: "?", title: entry.help });
    const box = element("div", {}, element("details", {},
      element("summary", {}, mark, label, why), element("p", { textContent: entry.help })));
    box.setAttribute("role", "listitem");
    return { box, label, swatch: mark };
  }
}
