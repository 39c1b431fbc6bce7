// Fetches the state about once a second and shows it. Text from a trace is only assigned to textContent.
"use strict";

const POLL_MS = 1000;
const PATIENCE_MS = 5000;
const QUIET_S = 5; // as in watcher.py
const at = (id) => document.getElementById(id);
const charts = new Map();
let seen = -1;
let state = null;
let failures = 0;

async function poll() {
  const started = performance.now();
  try {
    const answer = await fetch(`state?seen=${seen}`, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.status === 403) throw new Error("forbidden");
    if (!answer.ok) throw new Error(String(answer.status));
    const news = await answer.json();
    failures = 0;
    at("server-gone").hidden = true;
    const fresh = news.state_number !== seen;
    if (fresh) {
      state = news.state;
      seen = news.state_number;
    }
    showStatus(news);
    if (state !== null) {
      showProgress(news, state);
      if (fresh) showState(state);
    }
    at("view").hidden = state === null;
    if (state !== null && fresh) for (const chart of charts.values()) if (chart.plot === null) chart.draw();
  } catch (error) {
    failures += 1;
    at("server-gone").hidden = false;
    at("server-gone").textContent =
      error.message === "forbidden"
        ? "This address is of an earlier quorate watch; open the one that it printed last."
        : "quorate watch does not answer: it may have been stopped. What is shown is the last that it said; trying again …";
  }
  const wait = Math.min(POLL_MS * 2 ** Math.max(0, failures - 1), 5000);
  setTimeout(poll, Math.max(50, wait - (performance.now() - started)));
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setCommand(element, text) {
  if (element.textContent !== text) element.replaceChildren(...(text ? commandWords(text) : []));
}

/** As many children as there are rows of data: a child that stays keeps its place, its focus and its selection. */
function setCount(parent, count, made) {
  while (parent.children.length > count) parent.lastChild.remove();
  while (parent.children.length < count) parent.append(made());
}

// ---------------------------------------------------------------- status

function showStatus(news) {
  const [text, kind] = statusText(news);
  setText(at("status"), text);
  at("status").className = `banner ${kind}`;
  at("go-on").hidden = !news.to_go_on;
  setCommand(at("go-on").firstElementChild, news.to_go_on ?? "");
}

function statusText(news) {
  if (news.status === "absent") return [`waiting for ${news.trace}, which is not there yet`, "warn"];
  if (news.status === "unreadable") return [news.problem, "bad"];
  if (news.status === "reading")
    return [`reading … ${Math.floor(100 * news.read_share)} % (${whole(news.records)} records)`, ""];
  if (news.status === "ended") return [`the run has ended: ${state.ending}`, news.ended_well ? "good" : "warn"];
  if (news.quiet_s !== null && news.quiet_s >= QUIET_S)
    return [`no news for ${texts.clock(news.quiet_s)}: an update takes long, or the run broke off`, "warn"];
  return ["running", "good"];
}

function showProgress(news, state) {
  at("bar-done").style.width = `${100 * (state.share ?? 0)}%`;
  const kind = state.run.real ? "" : " virtual";
  const parts = [
    state.share === null ? null : texts.percent(state.share, 0),
    `${whole(state.updates)}${state.expected_updates ? ` of ${whole(state.expected_updates)}` : ""} updates`,
    `${texts.seconds(news.newest_s)}${kind}`,
  ];
  if (news.wall.updates_per_s !== null && !state.run.real)
    parts.push(`${texts.number(news.wall.updates_per_s)} updates a second of your time`);
  if (news.wall.left_s !== null) parts.push(`about ${texts.clock(news.wall.left_s)} left`);
  if (state.run.until) parts.push(`until ${state.run.until}`);
  if (state.resumed_at.length) parts.push(`resumed at update ${state.resumed_at.map(whole).join(", ")}`);
  setText(at("progress-text"), parts.filter(Boolean).join(" · "));
}

// ---------------------------------------------------------------- the run

function showState(state) {
  const { run } = state;
  setText(at("title"), `${run.policy} ${run.subject}`);
  document.title = `${state.share === null ? whole(state.updates) : texts.percent(state.share, 0)} · ${run.policy}`;
  const details = [
    `${whole(run.workers)} ${run.real ? "" : "simulated "}workers${run.real && run.engine ? ` (${run.engine})` : ""}`,
    run.latency ? `latency ${run.latency}` : null,
    run.seed === null ? null : `seed ${run.seed}`,
    run.real ? "real seconds" : "virtual seconds",
  ];
  setText(at("subtitle"), details.filter(Boolean).join(" · "));
  showFindings(state.findings);
  showTiles(state);
  showCharts(state);
  showChoices(state);
  showReasons(state);
  showWorkers(state.workers);
}

/** The findings: slow workers, their cost, the advice, and the command to type. */
function showFindings(findings) {
  const place = at("findings");
  setCount(place, findings.length, () => make("div", {}, make("p"), make("code", { class: "command" })));
  findings.forEach((one, index) => {
    const box = place.children[index];
    box.className = `finding ${one.kind}`;
    setText(box.firstChild, one.text);
    setCommand(box.lastChild, one.command ?? "");
  });
}

function showTiles(state) {
  const { pace, tickets, staleness } = state;
  const used = state.bytes.sent ? state.bytes.used / state.bytes.sent : null;
  const tiles = [
    ["rate", "updates/s, recent", texts.number(pace.recent_per_s), `overall ${texts.number(pace.per_s)}`],
    ["pace", `an update, last ${pace.recent_count}`, texts.seconds(pace.recent_median_s),
      `p90\u00a0${texts.seconds(pace.recent_p90_s)}, p99\u00a0${texts.seconds(pace.recent_p99_s)}`],
    ["overall", "an update, whole run", texts.seconds(pace.mean_s),
      `median\u00a0${texts.seconds(pace.median_s)}, p99\u00a0${texts.seconds(pace.p99_s)}`],
    ["dropped", "dropped tickets", texts.percent(tickets.drop_share),
      `${whole(tickets.dropped)} dropped, ${whole(tickets.applied)} applied, ${whole(tickets.lost)} lost`],
    ["staleness", "staleness, mean", staleness.mean.toFixed(2), `at most ${whole(staleness.max)}`],
    ["bytes", "bytes sent", texts.bytes(state.bytes.sent), used === null ? "" : `${texts.percent(used)} used`],
    ["samples", "samples applied", whole(state.samples), ""],
  ];
  [...state.measures].reverse().forEach((one, index) => {
    const place = state.measures.length - 1 - index;
    tiles.unshift([`measure-${place}`, one.name, texts.number(one.last), "last evaluation"]);
  });
  if (state.loss.last !== null) tiles.unshift(["loss", "loss", texts.number(state.loss.last), "of the last update"]);
  if (state.quorum.last !== null) tiles.push(["quorum", "quorum chosen", whole(state.quorum.last), ""]);
  const place = at("tiles");
  setCount(place, tiles.length, () => make("div", { class: "tile" }, ["name", "value", "more"].map((part) => make("div", { class: part }))));
  tiles.forEach(([id, ...lines], index) => {
    const tile = place.children[index];
    tile.id = `tile-${id}`;
    lines.forEach((line, part) => setText(tile.children[part], line));
  });
}

function showChart(id, data, options) {
  if (data[0].length === 0) return; // no data yet, or not in this run
  if (!charts.has(id)) charts.set(id, new Chart(at("charts"), { id: `chart-${id}`, ...options }));
  charts.get(id).show(data);
}

function showCharts(state) {
  const xLabel = state.run.real ? "seconds" : "virtual seconds";
  const xText = texts.tick;
  const band = ({ curve }) => [curve.time, curve.mean, curve.low, curve.high];
  const common = { xLabel, xText, kind: "band" };
  showChart("loss", band(state.loss), { ...common, title: "Loss", yText: texts.tick, colour: "computing" });
  state.measures.slice(0, 4).forEach((one, index) =>
    showChart(`measure-${index}`, band(one), { ...common, title: one.name, yText: texts.tick, colour: "second" }));
  showChart("pace", band(state.pace),
    { ...common, title: "Time per update (mean, least and most)", yText: texts.tickSeconds, colour: "computing" });
  if (state.kth_arrival_s.k.length > 1) showChart("kth", [state.kth_arrival_s.k, state.kth_arrival_s.mean_s],
    { title: "Mean time to the k-th arrival", xLabel: "k", xText, yText: texts.tickSeconds, kind: "line", colour: "late", whole: true });
  const { width, shares } = state.staleness;
  showChart("staleness", [shares.map((_, index) => index * width), shares],
    { title: "Staleness of applied gradients", xLabel: "versions behind", xText, yText: (share) => texts.percent(share, 0),
      kind: "bars", colour: "second", whole: true });
  const { time, mean } = state.quorum.curve;
  const still = time.length ? [[...time, Math.max(state.seconds, time[time.length - 1])], [...mean, state.quorum.last]] : [[], []];
  showChart("quorum", still,
    { ...common, title: "Quorum chosen", kind: "steps", yText: texts.tick, colour: "late" });
}

// ---------------------------------------------------------------- tables

function fill(table, head, rows, slow = []) {
  const shape = `${head.length} ${rows.length}`;
  if (table.dataset.shape !== shape) {
    table.dataset.shape = shape;
    const cells = (tag, words) => make("tr", {}, head.map(([name, kind]) => make(tag, { class: kind ?? "" }, words(name))));
    table.replaceChildren(make("thead", {}, cells("th", (name) => name)), make("tbody", {}, rows.map(() => cells("td", () => ""))));
  }
  rows.forEach((row, index) => {
    const line = table.tBodies[0].rows[index], { cells } = line;
    line.className = slow[index] ? "slow" : "";
    row.forEach((text, column) => setText(cells[column], text));
  });
}

function showReasons(state) {
  const { reasons, dropped } = state.tickets;
  const rows = reasons.map((one) => [one.reason, whole(one.count), texts.percent(one.count / dropped)]);
  fill(at("reasons"), [["reason", "text"], ["tickets"], ["share"]], rows.length ? rows : [["nothing was dropped", "", ""]]);
}

function showChoices(state) {
  at("choices-part").hidden = state.choices.length === 0;
  const rows = state.choices.map((one) => [whole(one.version), whole(one.quorum), one.reason]);
  fill(at("choices"), [["update"], ["quorum"], ["why", "text"]], rows);
}

const MEANING = {
  computing: "computing",
  waiting: "waiting",
  late: "late: its last ticket was dropped",
  lost: "lost",
};

function showWorkers(workers) {
  const legend = at("legend");
  const names = Object.keys(MEANING);
  if (legend.children.length === 0)
    legend.append(...names.map((name) => make("span", {}, make("i", { class: `dot ${name}` }), make("span"))));
  names.forEach((name, index) =>
    setText(legend.children[index].children[1], `${whole(workers.states[name])} ${MEANING[name]}`));
  const title = workers.all_listed
    ? `Workers (${whole(workers.count)}); the bar is its recent slowness`
    : `Workers: the ${workers.rows.length} slowest of ${whole(workers.count)}`;
  setText(at("workers-title"), title);
  showStrip(workers.rows);
  const slowest = [...workers.rows].sort((one, other) => (other.slowness ?? 0) - (one.slowness ?? 0)).slice(0, 50);
  fill(
    at("workers"),
    [["worker"], ["state", "word"], ["slowness"], ["slow in", "word"], ["a ticket, recent"], ["dropped, recent"], ["arrived"], ["dropped"], ["lost"]],
    slowest.map((one) => [
      String(one.worker), one.state, one.slowness === null ? NOTHING : `×${one.slowness.toFixed(2)}`, one.slow_in ?? NOTHING,
      texts.seconds(one.pace_s), texts.percent(one.drop_share, 0), whole(one.arrived), whole(one.dropped), whole(one.lost),
    ]),
    slowest.map((one) => one.slowness >= workers.slow),
  );
}

function showStrip(rows) {
  const strip = at("strip");
  setCount(strip, rows.length, () => make("div"));
  rows.forEach((one, index) => {
    const cell = strip.children[index];
    const name = MEANING[one.state] === undefined ? "waiting" : one.state;
    if (cell.className !== name) cell.className = name;
    const height = `${Math.round(Math.min(36, 12 * Math.max(0.5, one.slowness ?? 1)))}px`;
    if (cell.style.height !== height) cell.style.height = height;
    const title = `worker ${one.worker}: ${one.state}, ${texts.seconds(one.pace_s)} a ticket`;
    if (cell.title !== title) cell.title = title;
  });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.draw()));
poll();
