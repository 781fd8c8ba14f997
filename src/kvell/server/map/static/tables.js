// Tables: requests, groups, rungs and misses.  They hold ids and counts only.

const REASONS = {
  never_seen: (miss) => (miss.hit_tokens ? "never seen beyond the hit" : "never seen"),
  other_salt: () => "other salt",
  being_computed: () => "another request is still computing it",
  evicted: (miss) => `evicted, last seen ${count(miss.steps_ago, "step")} ago`,
  not_resumable: (miss) => (miss.groups.length
    ? `not resumable in ${count(miss.groups.length, "group")} (${miss.groups.join(", ")})`
    : "groups can go on at different lengths only"),
};

function why(miss) {
  const reason = REASONS[miss.reason](miss);
  return miss.seen_tokens > miss.hit_tokens ? `${reason}; ${miss.seen_tokens} tokens were seen` : reason;
}

// A cell is text, or a number, which is written at the right.  In a narrow box a row becomes a
// block of labelled values.
function fill(table, rows, nothing) {
  const heads = [...table.tHead.rows[0].cells];
  const made = rows.map((cells) => element("tr", {}, ...cells.map((cell, i) => {
    const item = element("td", {
      textContent: typeof cell === "number" ? cell.toLocaleString("en") : cell,
      title: i === 0 ? cell : "",
      className: [heads[i].className, i === 0 ? "id" : ""].join(" ").trim(),
    });
    item.dataset.label = heads[i].textContent;
    return item;
  })));
  if (!made.length) {
    const only = element("td", { colSpan: heads.length, textContent: nothing, className: "quiet" });
    made.push(element("tr", {}, only));
  }
  table.tBodies[0].replaceChildren(...made);
}

function fillRequests(table, requests) {
  fill(table, requests.rows.map((row) => [
    row.id, row.instance || "–", row.state, row.prompt_tokens, row.output_tokens,
    seconds(row.ttft_seconds), seconds(row.tpot_seconds), seconds(row.age_seconds),
  ]), "no request now");
}

function fillGroups(table, stats, kinds) {
  fill(table, stats.groups.map((group) => [
    group.name, kinds[group.name] === "state" ? "–" : percent(group.hit_rate),
    group.used_pages, group.cached_pages, group.evicted_pages,
  ]), "no groups");
}

function fillRungs(table, rungs, before) {
  const growth = Object.fromEntries(Object.entries(rungs).map(
    ([name, times]) => [name, Math.max(0, times - (before[name] ?? times))]));
  const taken = Object.entries(rungs).filter(([, times]) => times);
  taken.sort((a, b) => growth[b[0]] - growth[a[0]] || b[1] - a[1]);
  fill(table, taken.map(([name, times]) => [name, growth[name], times]), "no rung was taken yet");
}

function fillMisses(table, misses) {
  fill(table, misses.toReversed().map((miss) => [
    miss.id, miss.prompt_tokens, miss.hit_tokens, why(miss),
  ]), "no request missed a part of its prompt yet");
}
