// One instance: its map, the page that is looked at, its timelines and tables.

const DETAIL_MILLISECONDS = 150;
const ELASTIC = ["inflate", "deflate", "shrink_for_activations", "refused_by_device"];

class InstanceView {
  constructor(id) {
    this.id = id;
    this.columns = null;
    this.section = byId("instance").content.firstElementChild.cloneNode(true);
    this.part = (selector) => this.section.querySelector(selector);
    this.part("h2").textContent = id;
    this.spoken = this.part(".spoken");
    this.section.dataset.instance = id;
    this.detail = this.part(".detail");
    this.cells = new CellMap(this.part(".cells"), (index) => this.look(index));
    this.memory = new History();
    this.rungs = new History();
    this.kv = new Timeline("KV cache", bytes);
    const ifAny = (value) => (value === null ? "none" : bytes(value));
    this.beside = new Timeline("Activations, buffer", ifAny);
    this.ladder = new Timeline("Ladder rungs taken", (value) => value.toLocaleString("en"));
    this.part(".timelines").append(this.kv.figure, this.beside.figure, this.ladder.figure);
    this.known = null;
    this.askSoon = null;
    this.asking = false;
  }

  show(at, told) {
    const { stats, pages } = told;
    if (pages !== null) this.showPages(pages);
    if (stats !== null) this.showStats(at, stats);
    const silent = stats === null || pages === null ? "; it does not answer now" : "";
    this.part(".summary").textContent = `${told.state}${this.summary(stats)}${silent}`;
  }

  summary(stats) {
    if (stats === null || this.columns === null) return "";
    const tally = this.columns.tally();
    const withheld = tally.withheld ? `, ${tally.withheld} withheld for activations` : "";
    const sections = sectionsText(stats.sections);
    return `, step ${stats.step.toLocaleString("en")}: ${stats.running} running, `
      + `${stats.waiting} waiting; ${count(tally.total, "large page")} of `
      + `${bytes(stats.large_page_bytes)}: ${tally.used} used, ${tally.cached} cached, `
      + `${tally.empty} empty${withheld}${sections}`;
  }

  showPages(pages) {
    this.columns = new Columns(pages);
    this.cells.show(this.columns, colours);
    const canvas = this.cells.canvas;
    const tally = this.columns.tally();
    Object.assign(canvas.dataset, tally);
    canvas.setAttribute("aria-label", `${tally.total} large pages of ${this.id}: `
      + `${tally.used} used, ${tally.cached} cached, ${tally.empty} empty, `
      + `${tally.withheld} withheld for activations`);
    this.part(".legend").replaceChildren(...pages.groups.flatMap((group, i) => [
      swatch(`${group.name} used (${count(group.layers, "layer")})`, colours.used(i, 1)),
      swatch("cached", colours.cached(i, 1)),
    ]), swatch("withheld for activations", colours.withheld), swatch("empty", colours.empty));
    fillMisses(this.part(".misses"), pages.misses);
    this.misses = pages.misses;
    if (this.cells.at !== null) {
      this.describe(this.cells.at, this.known);
      this.learn(this.cells.at, false);
    }
  }

  showStats(at, stats) {
    this.memory.add(at, stats.bytes);
    this.rungs.add(at, stats.rungs);
    const growth = this.rungs.growth();
    const read = (name) => (values) => values[name] ?? null;
    this.kv.show(this.memory.rows, [
      { name: "used", colour: colours.hue(0), read: read("kv_used") },
      { name: "cached", colour: colours.hue(2), dash: [6, 3], read: read("kv_cached") },
      { name: "free", colour: colours.withheld, dash: [2, 3], read: read("kv_free") },
    ], colours);
    this.beside.show(this.memory.rows, [
      { name: "activations", colour: colours.hue(1), read: read("activation") },
      { name: "CPU buffer", colour: colours.hue(3), dash: [6, 3], read: read("cpu_buffer") },
    ], colours);
    this.ladder.show(this.rungs.rows, this.ladderLines(growth), colours);
    fillGroups(this.part(".groups"), stats, this.kinds());
    fillRungs(this.part(".rungs"), stats.rungs, growth);
  }

  // The balloon's rungs where there is one, and those that were taken most.
  ladderLines(growth) {
    const first = this.rungs.rows[0].values;
    const elastic = ELASTIC.filter((name) => name in first);
    const others = Object.keys(growth).filter((name) => growth[name] && !elastic.includes(name));
    others.sort((a, b) => growth[b] - growth[a]);
    const names = [...elastic, ...others].slice(0, 4);
    return names.map((name, i) => ({
      name, colour: colours.hue(i), dash: i % 2 ? [6, 3] : [],
      read: (values) => (values[name] ?? 0) - (first[name] ?? 0),
    }));
  }

  kinds() {
    const groups = this.columns?.groups ?? [];
    return Object.fromEntries(groups.map((group) => [group.name, group.kind]));
  }

  look(index) {
    this.describe(index, null);
    clearTimeout(this.askSoon);
    this.askSoon = setTimeout(() => this.learn(index, true), DETAIL_MILLISECONDS);
  }

  // Asks who owns a page; one question at a time, and the next poll asks again.  What somebody
  // has just gone to is spoken, but not how it changes.
  async learn(index, speaks) {
    if (speaks) this.spoken.textContent = this.detail.textContent;
    if (this.asking || !["used", "cached"].includes(this.columns.state(index))) return;
    this.asking = true;
    try {
      const known = await ask(`debug/pages/${encodeURIComponent(this.id)}/${index}`);
      if (this.cells.at === index) this.describe(index, known);
      if (speaks) this.spoken.textContent = this.detail.textContent;
    } catch (error) {
      const problem = element("div", { textContent: error.message });
      if (this.cells.at === index) this.detail.append(problem);
    } finally {
      this.asking = false;
    }
  }

  describe(index, known) {
    const { columns } = this;
    this.known = this.fits(known, index) ? known : null;
    const state = columns.state(index);
    const lines = [element("strong", { textContent: `Large page ${index}: ${state}` })];
    if (state === "used" || state === "cached") {
      const group = columns.groups[columns.group[index]];
      lines[0].textContent += `, group ${group.name}`;
      const holds = group.kind === "state" ? "a state" : count(group.page_tokens, "token");
      lines.push(`${count(columns.used[index], "small page")} used, ${columns.cached[index]} cached, `
        + `${columns.free(index)} free; ${holds} in ${bytes(group.page_bytes)} each. `);
      lines.push(state === "used" ? "In use now."
        : `Last used ${count(columns.age[index], "step")} ago.`);
      if (this.known !== null) lines.push(...this.owners(this.known));
    } else if (state === "withheld") {
      lines.push("Its memory holds activations of running steps.");
    }
    const made = element("div", {}, ...lines);
    if (this.detail.textContent !== made.textContent) this.detail.replaceChildren(made);
  }

  // What was learnt of a page is shown as long as its pages are divided as they were then.
  fits(known, index) {
    const { group, used, cached } = this.columns;
    return known !== null && known.large_page === index && known.group === group[index]
      && known.used === used[index] && known.cached === cached[index];
  }

  owners(known) {
    const told = known.owners.map((owner) => element("div", {},
      element("span", { className: "id", textContent: owner.id }),
      `: ${count(owner.pages, "page")} within tokens ${owner.first_token} to ${owner.end_token}`));
    if (known.more_owners) told.push(element("div", { textContent: `and ${known.more_owners} more` }));
    if (known.other_used) {
      told.push(element("div", { textContent:
        `${count(known.other_used, "page")} held for protected prefixes, copies or states` }));
    }
    if (known.cached_ends.length) {
      const more = known.cached_ends.length === 4 ? ", …" : "";
      told.push(element("div", {
        textContent: `cached ends of prefixes: ${known.cached_ends.join(", ")}${more} tokens`,
      }));
    }
    return told;
  }
}
