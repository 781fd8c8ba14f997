// One instance: its map, the page that is looked at, its timelines and tables.

const DETAIL_MILLISECONDS = 150;

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
    this.legend = new Legend(this.part(".legend"));
    this.cells = new CellMap(this.part(".cells"), (index) => this.look(index));
    this.loans = new LoansView(this.part(".loans"));
    this.kv = new Timeline("KV memory", bytes);
    this.sections = new Timeline("Sections", (value) => value.toLocaleString("en"));
    this.extra = new Timeline("Activations, CPU buffer", bytes);
    this.part(".timelines").append(this.kv.figure, this.sections.figure, this.extra.figure);
    this.known = null;
    this.askSoon = null;
    this.asking = false;
  }

  // `lends` says whether the server has instances that can lend each other memory.
  show(snapshot, at, history, lends) {
    const { stats, pages, loans } = snapshot;
    this.lends = lends;
    if (stats !== null) this.hasWithheld = stats.bytes.activation !== null;
    if (pages !== null) this.showPages(pages);
    this.loans.show(loans);
    this.showHistory(at, history, loans.section_bytes);
    if (stats !== null) {
      fillGroups(this.part(".groups"), stats, this.kinds());
      fillRungs(this.part(".rungs"), stats.rungs, stats.rungs_before);
    }
    const silent = stats === null || pages === null ? "; it does not answer now" : "";
    setText(this.part(".summary"), `${snapshot.state}${this.summary(stats)}${silent}`);
  }

  summary(stats) {
    if (stats === null || this.columns === null) return "";
    const tally = this.columns.tally();
    const withheld = tally.withheld ? `, ${tally.withheld} withheld for activations` : "";
    const { returned = 0, replaced = 0, lost = 0 } = stats.sections;
    const recalled = returned + replaced + lost;
    return `, step ${stats.step.toLocaleString("en")}: ${stats.running} running, `
      + `${stats.waiting} waiting; ${count(tally.total, "large page")} of `
      + `${bytes(stats.large_page_bytes)}: ${tally.used} used, ${tally.cached} cached, `
      + `${tally.empty} empty${withheld}`
      + (recalled ? `; ${count(recalled, "section")} recalled so far` : "");
  }

  showPages(pages) {
    this.columns = new Columns(pages);
    this.cells.show(this.columns, colours);
    const canvas = this.cells.canvas;
    const tally = this.columns.tally();
    Object.assign(canvas.dataset, tally);
    canvas.setAttribute("aria-label", `${tally.total} large pages of ${this.id}: `
      + `${tally.used} used, ${tally.cached} cached, ${tally.empty} empty, `
      + `${tally.withheld} withheld for activations`
      + (tally.lent ? `, ${tally.lent} of the used ones lent` : ""));
    this.legend.show(this.entries(pages.groups));
    fillMisses(this.part(".misses"), pages.misses);
    if (this.cells.at !== null) {
      this.describe(this.cells.at, this.known);
      this.learn(this.cells.at, false);
    }
  }

  // Entries of the map's legend; there are none of things that the server does not have.
  entries(groups) {
    const entry = (id, label, colour, mark = "") => ({ id, label, colour, mark, help: HELP[id] });
    return [
      ...groups.flatMap((group, i) => [
        { ...entry("used", `${group.name} used (${count(group.layers, "layer")})`,
          colours.used(i, 1)), id: `used-${i}` },
        { ...entry("cached", "cached", colours.cached(i, 1)), id: `cached-${i}` },
      ]),
      ...(this.hasWithheld ? [entry("withheld", "withheld for activations", colours.withheld)] : []),
      ...(this.lends ? [entry("borrowed", "borrowed section", colours.loan),
        entry("lent", "lent", colours.loan, "hole")] : []),
      entry("empty", "empty", colours.empty),
    ];
  }

  showHistory(at, history, sectionBytes) {
    const { id } = this;
    const points = (name) => history.points((row) => row.instances[id]?.[name]);
    const has = (name) => history.rows.some((row) => (row.instances[id]?.[name] ?? null) !== null);
    // With a single group the areas have its colours; otherwise they are of all groups.
    const isSingle = this.columns?.groups.length === 1;
    // Lent memory is in use, and has a colour of its own.
    const samples = history.rows.map((row) => row.instances[id] ?? null);
    const times = history.rows.map((row) => row.at_seconds);
    const lentBytes = samples.map((sample) => (
      sample && Math.min(sample.kv_used, sample.lent * sectionBytes)));
    const used = samples.map((sample, i) => sample && sample.kv_used - lentBytes[i]);
    const pool = history.rows.at(-1)?.instances[id]?.pool ?? 1;
    this.kv.show(at, [
      { id: "used", label: "used", points: used.map((value, i) => [times[i], value]),
        help: HELP.allUsed, colour: isSingle ? colours.used(0, 1) : colours.usedByAll },
      ...(lentBytes.some(Boolean) ? [{ id: "lent", label: "lent", help: HELP.lent,
        points: lentBytes.map((value, i) => [times[i], value]), colour: colours.loan }] : []),
      { id: "cached", label: "cached", points: points("kv_cached"), help: HELP.allCached,
        colour: isSingle ? colours.cached(0, 1) : colours.cachedByAll },
    ], colours, pool);
    this.sections.show(at, this.lends ? [
      { id: "borrowed", label: "borrowed", points: points("borrowed"), help: HELP.borrowed,
        colour: colours.loan, line: "solid" },
      { id: "lent", label: "lent", points: points("lent"), help: HELP.lent,
        colour: colours.loan, line: "dashed" },
    ] : [], colours);
    this.extra.show(at, [
      ...(has("activation") ? [{ id: "activation", label: "activations", help: HELP.activations,
        points: points("activation"), colour: colours.withheld, line: "solid" }] : []),
      ...(has("cpu_buffer") ? [{ id: "buffer", label: "CPU buffer", help: HELP.buffer,
        points: points("cpu_buffer"), colour: colours.ink, line: "dashed" }] : []),
    ], colours);
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
    const lines = known.owners.map((owner) => element("div", {},
      element("span", { className: "id", textContent: owner.id }),
      `: ${count(owner.pages, "page")} within tokens ${owner.first_token} to ${owner.end_token}`));
    if (known.more_owners) lines.push(element("div", { textContent: `and ${known.more_owners} more` }));
    const lent = this.columns.isLent(known.large_page) ? this.columns.lent[known.large_page] : 0;
    if (lent) {
      lines.push(element("div", { textContent: `${count(lent, "page")} lent to other instances` }));
    }
    if (known.other_used > lent) {
      lines.push(element("div", { textContent:
        `${count(known.other_used - lent, "page")} held for protected prefixes, copies or states` }));
    }
    if (known.cached_ends.length) {
      const more = known.cached_ends.length === 4 ? ", …" : "";
      lines.push(element("div", {
        textContent: `cached ends of prefixes: ${known.cached_ends.join(", ")}${more} tokens`,
      }));
    }
    return lines;
  }
}
