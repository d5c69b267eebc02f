"use strict";
// All text from the model goes in as text nodes; nothing here makes markup out of strings.
(() => {
  const plan = JSON.parse(document.getElementById("plan").textContent);
  const at = (id) => document.getElementById(id);
  const MOST = 60; // lines of one list in the panel before it is cut
  const ROLES = { out: "makes", in: "reads", scale: "scales", shift: "scales", stat: "scales" };

  function make(tag, options = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(options)) {
      if (key === "class") node.className = value;
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value);
    }
    node.append(...children.filter((c) => c !== null && c !== undefined));
    return node;
  }

  function short(number) {
    for (const [size, letter] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
      if (number >= size) return (number / size).toPrecision(3) + letter;
    }
    return String(number);
  }
  const score = (number) => Number(number).toPrecision(2);
  const arrow = ([before, after]) => (before === after ? `${before}` : `${before} → ${after}`);
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const pathOf = (layer) => layer.path || "(the model)";

  function paint(node, number) {
    const frozen = number === undefined || plan.groups[number].frozen !== null;
    node.classList.add(frozen ? "frozen" : "grouped");
    if (!frozen) node.style.setProperty("--hue", String(Math.round((number * 137.5 + 205) % 360)));
    return node;
  }

  function meter(part) {
    const fill = make("i");
    fill.style.width = `${100 * part}%`;
    return make("div", { class: "bar" }, fill);
  }

  // -- totals ------------------------------------------------------------------------------------

  function total(title, pair, unit) {
    const box = make("div", { class: "total" }, make("span", { class: "small" }, title));
    if (pair[0] === 0) {
      box.append(make("b", {}, "not counted"),
        make("span", { class: "small" }, "PyTorch's counter knows none of the operations"));
      return box;
    }
    const [before, after] = pair;
    box.append(
      make("b", { title: pair.map((n) => n.toLocaleString("en")).join(" → ") },
        `${short(before)} → ${short(after)}`),
      meter(after / before),
      make("span", { class: "small" }, `${((100 * after) / before).toFixed(1)} % ${unit}`),
    );
    return box;
  }

  const real = plan.groups.filter((g) => !g.name.endsWith(" (input)"));
  const pruned = real.filter((g) => g.kept < g.width);
  at("totals").append(
    total("Parameters", plan.parameters, "are left"),
    total("Multiply-accumulates of one run", plan.macs, "are left"),
    make("div", { class: "total" }, make("span", { class: "small" }, "Groups of channels"),
      make("b", {}, `${pruned.length} of ${real.length} pruned`),
      meter(real.length ? pruned.length / real.length : 0),
      make("span", { class: "small" }, `${plan.skipped.length} ${plan.skipped.length === 1 ? "layer stays" : "layers stay"} whole`)),
  );
  for (const [name, value] of Object.entries(plan.settings)) {
    at("settings").append(make("dt", {}, name), make("dd", {}, shown(value)));
  }

  // -- layers ------------------------------------------------------------------------------------

  // The widest layer that makes fewer channels fills its column: beside a vocabulary or a norm over
  // all that a dense block has joined, there would be nothing to see of the others.
  const widths = plan.layers.filter((l) => l.makes && l.out[1] < l.out[0]).map((l) => l.out[0]);
  const widest = Math.max(1, ...(widths.length ? widths : plan.layers.map((l) => l.out?.[0] ?? 0)));
  const rows = plan.layers.map((layer, i) => {
    const tag = make("span", { class: "tag", hidden: "" });
    const bar = make("span", { class: "bar" });
    if (layer.out) {
      const fill = make("i");
      fill.style.width = `${(100 * layer.out[1]) / Math.max(1, layer.out[0])}%`;
      const before = make("span", { class: "before" }, fill);
      before.style.width = `clamp(3px, ${(100 * layer.out[0]) / widest}%, 100%)`;
      bar.append(before);
    }
    const whole = !layer.out || layer.out[0] === layer.out[1];
    const row = make("button",
      { class: "row", type: "button", "aria-pressed": "false", onclick: () => choose(i) },
      make("span", {}, make("span", { class: "name" }, pathOf(layer)),
        make("span", { class: "kind" }, layer.kind), tag),
      bar,
      make("span", { class: `width${whole ? " whole" : ""}` },
        layer.out ? arrow(layer.out) : layer.runs ? "–" : "not run"));
    const own = layer.groups.find((g) => plan.groups[g].frozen === null) ?? layer.groups[0];
    return { row: paint(row, own), tag, layer };
  });
  at("layers").append(...rows.map((r) => r.row));

  let chosen = null; // the number of a layer, or null
  let group = null; // the number of the group that is lit

  function choose(i, which) {
    if (i === chosen && which === undefined) return clear();
    chosen = i;
    const own = rows[i].layer.groups;
    group = which ?? own.find((g) => plan.groups[g].frozen === null) ?? own[0]
      ?? rows[i].layer.reads[0] ?? null;
    light();
    rows[i].row.scrollIntoView({ block: "nearest" });
  }

  function clear() {
    chosen = group = null;
    light();
  }

  function chooseGroup(number) {
    if (group === number) return clear();
    const lead = plan.groups[number].members.find((m) => m[3] === "out") ?? plan.groups[number].members[0];
    choose(lead[0], number);
  }

  function light() {
    const roles = new Map();
    for (const [i, , , role] of group === null ? [] : plan.groups[group].members) {
      roles.set(i, (roles.get(i) ?? new Set()).add(ROLES[role] ?? "uses"));
    }
    rows.forEach(({ row, tag }, i) => {
      row.setAttribute("aria-pressed", String(i === chosen));
      row.classList.toggle("member", roles.has(i));
      tag.hidden = !roles.has(i);
      tag.textContent = roles.has(i) ? [...roles.get(i)].join(", ") : "";
    });
    const list = at("layers");
    list.classList.toggle("chosen", chosen !== null);
    list.style.removeProperty("--shown");
    if (chosen !== null) {
      const probe = paint(make("span"), group ?? undefined);
      list.append(probe);
      list.style.setProperty("--shown", getComputedStyle(probe).getPropertyValue("--group"));
      if (probe.style.getPropertyValue("--hue")) {
        list.style.setProperty("--hue", probe.style.getPropertyValue("--hue"));
      }
      probe.remove();
    }
    for (const card of document.querySelectorAll(".score")) {
      card.setAttribute("aria-pressed", String(Number(card.dataset.group) === group));
    }
    showPanel();
  }

  function listed(items, most = MOST) {
    const list = make("ul", {}, ...items.slice(0, most).map((item) => make("li", {}, ...item)));
    if (items.length > most) {
      const rest = make("button", { class: "plain", type: "button" }, `${items.length - most} more`);
      rest.addEventListener("click", () => list.replaceWith(listed(items, Infinity)));
      list.append(make("li", { class: "more" }, rest));
    }
    return list;
  }

  function showPanel() {
    const panel = at("panel");
    panel.replaceChildren();
    panel.classList.toggle("open", chosen !== null);
    panel.scrollTop = 0;
    if (chosen === null) {
      panel.append(make("p", { class: "soft" },
        "No layer is chosen. Choose one to see which layers lose channels with it, and which calls of the model couple them."));
      return;
    }
    const { layer } = rows[chosen];
    panel.append(make("div", { class: "head" }, make("span", { class: "name" }, pathOf(layer)),
      make("button", { class: "plain", type: "button", onclick: clear }, "Clear")),
    make("p", { class: "soft" }, layer.kind + (layer.runs ? "" : ", not called on the example input")));
    panel.append(listed(layer.tensors.map(([name, before, after]) => [
      make("code", {}, name), ` ${(before ?? ["new"]).join("×")}`,
      after && String(before) !== String(after) ? ` → ${after.join("×")}` : ""])));
    if (layer.macs[0]) {
      panel.append(make("p", { class: "soft" }, `${layer.macs.map(short).join(" → ")} multiply-accumulates`));
    }
    const relations = [...layer.groups.map((g) => [layer.makes ? "makes" : "uses", g]),
      ...layer.reads.filter((g) => !layer.groups.includes(g)).map((g) => ["reads", g])];
    const others = relations.map(([word, g]) => [paint(make("span", { class: "pair" },
      make("span", { class: "soft" }, word),
      make("button", { class: "plain", type: "button", "aria-pressed": String(g === group),
        onclick: () => choose(chosen, g) },
      make("span", { class: "dot" }), make("span", { class: "name" }, plan.groups[g].name))), g)]);
    if (others.length) panel.append(make("h3", {}, "Groups of channels"), listed(others, 12));
    if (group !== null) panel.append(...aboutGroup(plan.groups[group]));
  }

  function aboutGroup(g) {
    const parts = [make("h3", {}, "Group that is lit"), make("p", {}, make("span", { class: "name" }, g.name), ": ",
      g.kept === g.width ? `${g.width} units, all stay` : `${g.width} units, ${g.kept} stay`,
      g.carriers ? `, ${g.carriers} of them to carry constants` : "")];
    if (g.frozen) {
      parts.push(make("p", {}, "It stays whole: ", g.frozen, g.line ? make("code", {}, ` ${g.line}`) : null));
    }
    if (g.approximate.length) {
      parts.push(make("p", { class: "soft" }, `Approximate: ${g.approximate.join(", ")} counts its channels.`));
    }
    if (g.importance) parts.push(histogram(g.importance), ends(g.importance));
    parts.push(make("h3", {}, `Coupled by ${g.calls.length} ${g.calls.length === 1 ? "call" : "calls"}`));
    parts.push(listed(g.calls.map(([via, layers]) => {
      const others = layers.map((i) => pathOf(plan.layers[i])).filter((path) => path !== via);
      const more = others.length > 4 ? ` and ${others.length - 4} more` : "";
      return [make("code", {}, via),
        make("span", { class: "soft" }, ` with ${others.slice(0, 4).join(", ")}${more}`)];
    })));
    parts.push(make("h3", {}, `${g.members.length} axes that shrink together`));
    parts.push(listed(g.members.map(([i, name, dim, role]) => [
      make("code", {}, [plan.layers[i].path, name].filter(Boolean).join(".")),
      make("span", { class: "soft" }, ` dim ${dim}, ${ROLES[role] ?? "used"}`)])));
    return parts;
  }

  function filterLayers() {
    const word = at("layer-filter").value.toLowerCase();
    const makers = at("only-makers").checked;
    for (const { row, layer } of rows) {
      row.hidden = (makers && !layer.makes)
        || !`${layer.path} ${layer.kind}`.toLowerCase().includes(word);
    }
  }
  at("layer-filter").addEventListener("input", filterLayers);
  at("only-makers").addEventListener("change", filterLayers);

  at("layers").addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const seen = rows.map((r) => r.row).filter((r) => !r.hidden);
    const next = seen[seen.indexOf(document.activeElement) + step];
    if (next) next.focus();
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chosen !== null) {
      const row = rows[chosen].row;
      clear();
      row.focus();
    }
  });

  // -- reasons -----------------------------------------------------------------------------------

  const lines = new Map(plan.groups.filter((g) => g.line).map((g) => [g.frozen, g.line]));
  const reasons = [...plan.skipped, ...plan.notes.map(([what, why]) => [what, `note: ${why}`])]
    .map(([what, why]) => ({ what: what || "(the model)", why, node: make("tr", {},
      make("td", {}, make("span", { class: "name" }, what || "(the model)")),
      make("td", {}, why, lines.has(why) ? make("code", { class: "soft" }, ` ${lines.get(why)}`) : null)) }));
  at("reasons").tBodies[0].append(...reasons.map((r) => r.node));
  const kinds = new Map();
  for (const { why } of reasons) kinds.set(why, (kinds.get(why) ?? 0) + 1);
  at("reason-kind").append(make("option", { value: "" }, `Every reason (${kinds.size})`),
    ...[...kinds].sort((a, b) => b[1] - a[1]).map(([why, n]) => make("option", { value: why }, `${n} × ${why}`)));

  function filterReasons() {
    const word = at("reason-filter").value.toLowerCase();
    const kind = at("reason-kind").value;
    let count = 0;
    for (const { what, why, node } of reasons) {
      node.hidden = (kind !== "" && why !== kind) || !`${what} ${why}`.toLowerCase().includes(word);
      count += !node.hidden;
    }
    at("reason-count").textContent = reasons.length ? `${count} of ${reasons.length}` : "Nothing: every layer is pruned.";
  }
  at("reason-filter").addEventListener("input", filterReasons);
  at("reason-kind").addEventListener("change", filterReasons);
  filterReasons();

  // -- importance --------------------------------------------------------------------------------

  function bars(counts, below, top) {
    return counts.map((n, i) => (n === 0 ? "" : `M${i * 4} ${40 - (40 * below[i]) / top}h3.4v${(-40 * n) / top}h-3.4z`)).join("");
  }

  function histogram({ kept, removed }) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", `0 0 ${kept.length * 4} 40`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    const sum = (list) => list.reduce((a, b) => a + b, 0);
    svg.setAttribute("aria-label", `${sum(removed)} removed, ${sum(kept)} kept`);
    const top = Math.max(...kept.map((n, i) => n + removed[i]));
    for (const [name, counts, below] of [["goes", removed, removed.map(() => 0)], ["stays", kept, removed]]) {
      const path = document.createElementNS(space, "path");
      path.setAttribute("class", name);
      path.setAttribute("d", bars(counts, below, top));
      svg.append(path);
    }
    return svg;
  }

  const ends = ({ low, high }) => make("span", { class: "axis" }, make("span", {}, score(low)), make("span", {}, score(high)));

  plan.groups.forEach((g, i) => {
    if (!g.importance) return;
    at("scores").append(make("button",
      { class: "score", type: "button", "data-group": String(i), "aria-pressed": "false", onclick: () => chooseGroup(i) },
      make("span", { class: "name" }, g.name), make("span", { class: "soft" }, arrow([g.width, g.kept])),
      histogram(g.importance), ends(g.importance)));
  });
  if (!at("scores").children.length) at("scores").append(make("p", { class: "soft" }, "No unit is removed."));

  // -- changes -----------------------------------------------------------------------------------

  for (const [name, value] of Object.entries(plan.attributes)) {
    at("attributes").tBodies[0].append(make("tr", {},
      make("td", {}, make("span", { class: "name" }, name)), make("td", {}, shown(value))));
  }
  for (const [path, source] of Object.entries(plan.code)) {
    at("code").append(make("details", {}, make("summary", {}, make("span", { class: "name" }, path || "(the model)"),
      " gets this forward"), make("pre", {}, make("code", {}, source))));
  }
  at("changes").hidden = !Object.keys(plan.attributes).length && !Object.keys(plan.code).length;

  light();
})();
