"use strict";
// The report: one section after the other, each left out, with a line that says why, where its run has nothing for it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs, SEVERAL = RUNS.length > 1;
const REPORT = document.getElementById("report");
const SECONDS = DATA.seconds === "mixed" ? "seconds" : DATA.seconds === "virtual" ? "virtual seconds" : "seconds";

function section(id, title, words) {
  const holder = make("section", { id }, make("h2", {}, title), words ? make("p", { class: "quiet" }, words) : null);
  REPORT.append(holder);
  return holder;
}

function card(title, ...inside) {
  return make("figure", { class: "card" }, title ? make("h3", {}, title) : null, ...inside);
}

/** Which runs lack something, each with its reason, in one line. */
function absentLine(key) {
  const lacking = RUNS.filter((run) => run.absent[key]);
  if (!lacking.length) return null;
  const reasons = [...new Set(lacking.map((run) => run.absent[key]))];
  const named = (reason) => lacking.filter((run) => run.absent[key] === reason).map((run) => run.label).join(", ") + ": ";
  const forAll = lacking.length === RUNS.length && reasons.length === 1;
  const words = forAll ? sentence(reasons[0]) : reasons.map((reason) => named(reason) + reason).join("; ") + ".";
  return make("p", { class: "absent", "data-absent": key }, words);
}

function sentence(words) {
  return words[0].toUpperCase() + words.slice(1) + ".";
}

function radios(name, legend, choices, chosen, changed) {
  return make("fieldset", {}, make("legend", {}, legend), choices.map(([value, words]) =>
    make("label", {}, make("input", { type: "radio", name, value, checked: value === chosen, onchange: () => changed(value) }), " " + words)));
}

function tick(words, on, changed) {
  return make("label", {}, make("input", { type: "checkbox", checked: on, onchange: (event) => changed(event.target.checked) }), " " + words);
}

function runLegend() {
  if (!SEVERAL) return null;
  return make("div", { class: "legend" }, RUNS.map((run) => make("span", {}, swatch(run), run.label)));
}

// ---------------------------------------------------------------- who they are

function showRuns() {
  REPORT.append(make("h1", {}, SEVERAL ? `${RUNS.length} runs side by side` : RUNS[0].label));
  REPORT.append(make("p", { class: "quiet" }, SEVERAL ? RUNS.map((run) => run.label).join(" · ") : RUNS[0].name));
  for (const words of DATA.notes) REPORT.append(make("p", { class: "notice" }, words));
  const grid = make("div", { class: SEVERAL ? "grid" : "", id: "runs", style: { marginTop: "14px" } });
  for (const run of RUNS) grid.append(runCard(run));
  REPORT.append(grid);
}

function runCard(run) {
  const engine = run.engine, facts = [
    run.task ? `task ${run.task}` : "without gradients",
    `${run.workers} ${run.workers === 1 ? "worker" : "workers"}`,
    engine.name === "simulated" ? "simulated, virtual seconds" : `${engine.name} engine, real seconds`,
    engine.latency ? `${engine.name === "simulated" ? "latency" : "artificial delays"} ${engine.latency}` : null,
    engine.network ? `network ${engine.network}` : null,
    engine.faults ? `faults ${engine.faults}` : null,
    `seed ${run.seed}`,
    run.end === null ? "broke off" : `ended: ${run.end}`,
  ].filter(Boolean);
  const broke = run.end === null ? make("p", { class: "notice" }, "This run broke off, and is shown as far as its trace is whole" + (run.left_out ? `: ${run.left_out}.` : ".")) : null;
  const empty = run.absent.updates ? make("p", { class: "notice" }, sentence(run.absent.updates)) : null;
  return make("article", { class: "card" },
    make("h3", {}, SEVERAL ? swatch(run) : null, run.label),
    make("p", { class: "quiet" }, facts.join(" · ")), broke, empty,
    make("dl", { class: "figures" }, keyFigures(run).map(([name, value, small]) =>
      make("div", {}, make("dt", {}, name), make("dd", { "data-figure": name }, value, small ? make("small", {}, small) : null)))),
    dropsTable(run));
}

function keyFigures(run) {
  const reached = DATA.comparison[RUNS.indexOf(run)].time_to_target_s;
  const { summary } = run, { tickets, update_seconds: took, worker_seconds: work } = summary;
  const all = tickets.applied + tickets.dropped + tickets.lost, ended = all || 1, spent = work.compute + work.idle || 1;
  const figures = [
    ["updates", whole(summary.updates), `in ${seconds(summary.seconds)}`],
    ["an update took", seconds(took.mean), `median ${seconds(took.median)}, 99\u00a0% within\u00a0${seconds(took.p99)}`],
    ["samples per second", number(run.samples_per_s), `${whole(summary.samples.applied)} in all`],
    ["tickets applied", whole(tickets.applied), `${share(tickets.applied / ended)} of ${whole(all)}`],
    ["dropped", share(tickets.dropped / ended), `${whole(tickets.dropped)}, ${tickets.cancelled === tickets.dropped && tickets.dropped ? "all" : whole(tickets.cancelled) + " of them"} cancelled`],
    ["workers waited", share(work.idle / spent), `${share(work.wasted / spent)} spent on what was not used`],
    ["staleness", number(summary.staleness.mean), `at most ${whole(summary.staleness.max)}`],
  ];
  if (DATA.target) figures.unshift([DATA.target, reached === null ? "never" : seconds(reached), "first measured after this time"]);
  if (tickets.lost) figures.push(["lost", whole(tickets.lost), "tickets, with their workers"]);
  if (tickets.refused) figures.push(["refused", whole(tickets.refused), "gradients with NaN or Inf"]);
  if (summary.bytes.sent) figures.push(["sent", bytes(summary.bytes.sent), `${share(summary.bytes.used / summary.bytes.sent)} used`]);
  if (summary.loss !== null) figures.push(["last loss", measure(summary.loss), null]);
  for (const [name, value] of Object.entries(summary.evaluation)) figures.push([spoken(name), measure(value), "last measured"]);
  return figures;
}

function dropsTable(run) {
  const reasons = Object.entries(run.summary.tickets.reasons).sort((one, other) => other[1] - one[1]);
  if (!reasons.length) return null;
  return make("p", { class: "quiet", style: { marginTop: "10px" }, "data-drops": "" },
    "Dropped: " + reasons.map(([reason, count]) => `${whole(count)} × ${reason}`).join("; ") + ".");
}

function showComparison() {
  if (!SEVERAL) return;
  const name = DATA.measure ? spoken(DATA.measure) : "loss";
  const columns = [
    ["run", (row) => row.label],
    DATA.target ? ["time to " + DATA.target, (row) => (row.time_to_target_s === null ? "never" : seconds(row.time_to_target_s))] : null,
    ["speed-up", (row) => (row.speed_up === null ? NOTHING : "×" + row.speed_up.toFixed(2))],
    [DATA.seconds === "virtual" ? "virtual time" : "time", (row) => seconds(row.seconds)],
    ["updates", (row) => whole(row.updates)],
    ["samples per s", (row) => number(row.samples_per_s)],
    ["final " + name, (row) => measure(row.final)],
    ["staleness (max)", (row) => `${number(row.staleness_mean)} (${row.staleness_max})`],
    ["dropped", (row) => share(row.dropped_share)],
    ["wasted", (row) => share(row.wasted_share)],
    ["waiting", (row) => share(row.waiting_share)],
    ["sent", (row) => (row.bytes_sent ? bytes(row.bytes_sent) : NOTHING)],
  ].filter(Boolean).filter(([title]) => !title.startsWith("final") || DATA.comparison.some((row) => row.final !== null));
  const against = DATA.target ? `time to ${DATA.target}` : "samples per second";
  section("comparison", "Side by side", `Speed-up is in ${against}, against ${RUNS[0].label}.`).append(
    make("div", { class: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, columns.map(([title]) => make("th", {}, title)))),
      make("tbody", {}, DATA.comparison.map((row, index) => make("tr", {}, columns.map(([, cell], place) =>
        make("td", {}, place === 0 ? swatch(RUNS[index]) : null, cell(row)))))))));
}

// ---------------------------------------------------------------- what was learned

const AXES = { time: [SECONDS, number], updates: ["updates", whole], samples: ["samples", whole] };

function showLearning() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.measures)))];
  const holder = section("learning", "What was learned", null);
  const missing = [absentLine("learning"), absentLine("measures")].filter(Boolean);
  if (!names.length && !RUNS.some((run) => run.loss)) { holder.append(...missing); return; }
  const state = { x: "time", smooth: true, log: false };
  const charts = [], later = [];
  const again = () => charts.forEach((entry) => entry.again());
  const positive = RUNS.every((run) => !run.loss || run.loss.value.every((value) => value === null || value > 0));
  holder.append(make("div", { class: "controls" },
    radios("x-axis", "over", [["time", "time"], ["updates", "updates"], ["samples", "samples"]], "time", (value) => { state.x = value; again(); }),
    RUNS.some((run) => run.loss) ? tick("smooth the loss", true, (on) => { state.smooth = on; again(); }) : null,
    positive && RUNS.some((run) => run.loss) ? tick("logarithmic loss", false, (on) => { state.log = on; again(); }) : null), ...missing);
  const grid = make("div", { class: "grid" });
  holder.append(grid);
  const curve = (title, of, isLoss) => {
    const plot = make("div");
    grid.append(card(title, plot));
    later.push(() => chart(plot, (target) => lines(target, {
      series: RUNS.filter(of).map((run) => ({
        label: SEVERAL ? run.label : title, colour: run.colour, dashed: run.dashed, xs: of(run)[state.x],
        ys: isLoss && state.smooth ? smoothed(of(run).value) : of(run).value,
      })),
      xLabel: AXES[state.x][0], xText: AXES[state.x][1], yText: measure, logY: isLoss && state.log,
    })));
  };
  for (const name of names) curve(spoken(name), (run) => run.measures[name], false);
  if (RUNS.some((run) => run.loss)) curve("training loss", (run) => run.loss, true);
  charts.push(...later.map((draw) => draw())); // only now do the cards have their widths
}

/** The mean of a fiftieth of the points around each. */
function smoothed(values) {
  const half = Math.floor(values.length / 100);
  if (half < 1) return values;
  const sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums[sums.length - 1] + (value === null ? 0 : value));
    counts.push(counts[counts.length - 1] + (value === null ? 0 : 1));
  }
  return values.map((value, index) => {
    const low = Math.max(0, index - half), high = Math.min(values.length, index + half + 1);
    return counts[high] > counts[low] ? (sums[high] - sums[low]) / (counts[high] - counts[low]) : null;
  });
}

// ---------------------------------------------------------------- when gradients arrive

function showArrivals() {
  const timed = RUNS.filter((run) => run.arrivals);
  const holder = section("arrivals", "When the gradients of a round arrive",
    timed.length ? "Time from a new version to the k-th gradient of it. Where late work is cancelled, gradients beyond the quorum are never seen. Click a name under a chart to hide or show its line." : null);
  const missing = absentLine("arrivals");
  if (missing) holder.append(missing);
  if (!timed.length) return;
  let run = timed[0];
  const left = make("div"), right = make("div"), grid = make("div", { class: "grid" });
  const cdf = card("share of rounds in which the k-th gradient is there", left);
  grid.append(cdf, card("mean time to the k-th gradient", right));
  const drawn = [];
  if (timed.length > 1) {
    holder.append(make("div", { class: "controls" }, make("label", {}, "distribution of ", make("select", {
      onchange: (event) => { run = timed[event.target.value]; drawn[0].again(); },
    }, timed.map((one, index) => make("option", { value: index }, one.label))))));
  }
  holder.append(grid);
  drawn.push(chart(left, (target) => {
    const chosen = run.arrivals.chosen;
    const last = Math.max(...chosen.flatMap((one) => [one.seconds[one.seconds.length - 3]]));
    const plot = lines(target, {
      series: chosen.map((one, place) => ({ label: "k = " + one.k, colour: shade(place, chosen.length), xs: one.seconds, ys: one.share, points: false })),
      xLabel: run.seconds_are === "virtual" ? "virtual seconds" : "seconds", yText: share, yRange: [0, 1],
    });
    plot.setScale("x", { min: 0, max: last * 1.05 });
    return plot;
  }));
  chart(right, (target) => lines(target, {
    series: timed.map((one) => ({ label: one.label, colour: one.colour, dashed: one.dashed, xs: one.arrivals.means.map((_, index) => index + 1), ys: one.arrivals.means, points: one.arrivals.means.length <= 24 })),
    xLabel: "k", xText: (value) => (Number.isInteger(value) ? whole(value) : ""), yText: seconds, fromZero: true,
    marks: timed.filter((one) => one.policy.quorum && one.policy.quorum < one.workers).map((one) => ({ x: one.policy.quorum, label: "quorum of " + one.label, colour: one.colour })),
  }));
}

// ---------------------------------------------------------------- what workers did

function showTimelines() {
  const holder = section("timeline", "What the workers did", "Drag to zoom in, Shift and drag to move, double-click for the whole run; or Ctrl and the wheel, or + − ← → when the picture has the focus. From afar a row shows shares of its time; close up, every ticket.");
  const kinds = ["used", "dropped", "cancelled", "lost", "gone", "waiting"];
  holder.append(make("div", { class: "legend" }, kinds.map((kind) => make("span", {}, make("span", { class: "box", style: { background: `var(--${kind})` } }), KIND_WORDS[kind]))));
  const longest = Math.max(...RUNS.map((run) => run.timeline.seconds)), views = [];
  const shared = SEVERAL && DATA.seconds !== "mixed";
  if (SEVERAL) {
    holder.append(make("div", { class: "controls" }, tick("one time axis for all", shared, (on) => {
      for (const view of views) { view.seconds = on ? longest : view.data.seconds || 1; view.show(0, view.seconds); }
    })));
  }
  for (const run of RUNS) {
    const data = run.timeline, picture = make("div", { class: "timeline" }), says = make("div", { class: "says" });
    const box = make("div", { class: "card", style: { marginTop: "12px" } }, SEVERAL ? make("h3", {}, swatch(run), run.label) : null);
    holder.append(box);
    const words = [];
    if (data.workers_per_row > 1) words.push(`A row is ${data.workers_per_row} workers: there are too many to show single tickets.`);
    else if (!data.whole) words.push(`Single tickets are kept for the beginning, the end and the slowest stretches (${whole(data.segments)} of them); elsewhere the picture stays an outline.`);
    if (words.length) box.append(make("p", { class: "quiet" }, words.join(" ")));
    let view = null;
    const button = (name, does) => make("button", { type: "button", onclick: () => does(view) }, name);
    box.append(make("div", { class: "controls" },
      button("whole run", (one) => one.show(0, one.seconds)),
      data.moments.map((moment) => button(moment.name, (one) => one.show(moment.from, moment.to))),
      button("+", (one) => one.zoom(0.5)), button("−", (one) => one.zoom(2)), button("←", (one) => one.move(-0.5)), button("→", (one) => one.move(0.5))));
    box.append(picture, says);
    view = new WorkerTimeline(picture, says, data, shared ? longest : 0);
    views.push(view);
  }
}

function showWorkers() {
  const holder = section("workers", "Who is slow, and in what",
    "Slowness is a worker's median ticket against the usual worker's; a ticket that was cancelled counts as at least as long as it ran. Click a heading to sort.");
  const missing = absentLine("parts");
  if (missing) holder.append(missing);
  for (const run of RUNS) if (run.worker_rows.length) holder.append(workerTable(run));
}

function workerTable(run) {
  const parts = run.has_parts ? ["data", "compute", "transfer"].map((name) => [name, (row) => (row.parts_s ? row.parts_s[name] : null), seconds]) : [];
  const columns = [
    ["worker", (row) => row.worker, String],
    ["slowness", (row) => row.slowness, (value, row) => (value === null ? NOTHING : (row.median_s === null ? "≥ " : "") + "×" + value.toFixed(2))],
    ["median ticket", (row) => (row.median_s === null ? row.at_least_s : row.median_s), (value, row) => (row.median_s === null && value !== null ? "> " : "") + seconds(value)],
    ["90 % within", (row) => row.p90_s, seconds],
    ...parts,
    ...(run.has_parts ? [["slow in", (row) => row.slow_in || "", (value) => value || NOTHING]] : []),
    ["tickets used", (row) => row.applied, whole], ["dropped", (row) => row.dropped, whole], ["lost", (row) => row.lost, whole],
    ["used, wasted, waiting", (row) => (row.live_s ? row.idle_s / row.live_s : 0), (value, row) => timeBar(row)],
  ];
  let sorted = 1, down = true, all = false;
  const body = make("tbody"), more = make("button", { type: "button", onclick: () => { all = !all; fill(); } });
  const fill = () => {
    const rows = [...run.worker_rows].sort((one, other) => {
      const [a, b] = [columns[sorted][1](one), columns[sorted][1](other)];
      const order = a === null ? 1 : b === null ? -1 : typeof a === "string" ? (down ? b.localeCompare(a) : a.localeCompare(b)) : down ? b - a : a - b;
      return order || one.worker - other.worker;
    });
    body.replaceChildren(...rows.slice(0, all ? rows.length : 12).map((row) => make("tr", { "data-worker": row.worker }, columns.map(([name, value, words]) =>
      make("td", { class: name === "slowness" && row.slowness >= 1.2 ? "flag" : name === "slow in" && row.slow_in ? "flag" : "" }, words(value(row), row))))));
    more.textContent = all ? "show the first 12" : `show all ${rows.length}`;
    more.hidden = rows.length <= 12;
  };
  fill();
  const head = make("tr", {}, columns.map(([name], index) => make("th", { class: "sortable", onclick: () => { down = sorted === index ? !down : index > 0; sorted = index; fill(); } }, name)));
  const left = run.worker_rows_left_out;
  return make("div", { class: "card", style: { marginTop: "12px" } }, SEVERAL ? make("h3", {}, swatch(run), run.label) : null,
    make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body)),
    make("p", {}, more), left ? make("p", { class: "quiet" }, `${whole(left)} quicker workers are left out.`) : null);
}

function timeBar(row) {
  const live = row.live_s || 1, used = Math.max(0, row.compute_s - row.wasted_s);
  const part = (value, kind) => make("span", { style: { width: (100 * value) / live + "%", background: `var(--${kind})` } });
  const title = `${share(used / live)} used, ${share(row.wasted_s / live)} wasted, ${share(row.idle_s / live)} waiting`;
  return make("div", { class: "bar", title }, part(used, "used"), part(row.wasted_s, "dropped"));
}

// ---------------------------------------------------------------- staleness and bytes

function showStaleness() {
  const stale = RUNS.filter((run) => run.summary.staleness.max > 0);
  const holder = section("staleness", "Staleness", null);
  if (!stale.length) { holder.append(make("p", { class: "absent" }, "Every gradient was applied to the version that it was computed at: staleness 0.")); return; }
  const groups = stale[0].staleness.map((bar) => (bar.most === null ? bar.least + "+" : bar.most === bar.least ? String(bar.least) : `${bar.least}–${bar.most}`));
  const plot = make("div");
  holder.append(runLegend() || "", card("share of applied gradients by staleness", plot));
  chart(plot, (target) => bars(target, {
    groups, xLabel: "versions made between reading and applying", valueText: share,
    series: RUNS.map((run) => ({ label: run.label, colour: run.colour, values: run.staleness.map((bar) => bar.tickets / run.summary.tickets.applied) })),
  }));
}

function showBytes() {
  const holder = section("bytes", "Bytes", null);
  const missing = absentLine("bytes");
  if (missing) holder.append(missing);
  const sending = RUNS.filter((run) => run.summary.bytes.sent);
  if (!sending.length) return;
  const most = Math.max(...sending.map((run) => run.summary.bytes.sent));
  holder.append(make("div", { class: "legend" },
    make("span", {}, make("span", { class: "box", style: { background: "var(--used)" } }), "used"),
    make("span", {}, make("span", { class: "box", style: { background: "var(--dropped)" } }), "wasted: for gradients that were dropped or lost")));
  const box = make("div", { class: "card" });
  holder.append(box);
  for (const run of sending) {
    const { sent, used, wasted } = run.summary.bytes;
    box.append(make("p", { style: { margin: "8px 0 3px" }, "data-bytes": run.label }, SEVERAL ? swatch(run) : "", `${SEVERAL ? run.label + ": " : ""}${bytes(sent)} sent, ${bytes(used)} used, ${bytes(wasted)} wasted (${share(wasted / sent)})`),
      make("div", { class: "bar", style: { width: (100 * sent) / most + "%" } },
        make("span", { style: { width: (100 * used) / sent + "%", background: "var(--used)" } }),
        make("span", { style: { width: (100 * wasted) / sent + "%", background: "var(--dropped)" } })));
  }
}

// ---------------------------------------------------------------- choices, of the policy and of the planner

function showChoices() {
  const choosing = RUNS.filter((run) => run.choices);
  if (!choosing.length) return;
  const holder = section("choices", "What the policy chose", "The quorum over the run, and the reason of every change.");
  const plot = make("div");
  holder.append(card("quorum", plot));
  chart(plot, (target) => lines(target, {
    series: choosing.map((run) => ({ label: run.label, colour: run.colour, dashed: run.dashed, points: false, ...stairs(run) })),
    xLabel: SECONDS, xText: number, yText: whole, fromZero: true,
  }));
  for (const run of choosing) {
    const changes = run.choices.changes;
    holder.append(make("div", { class: "card", style: { marginTop: "12px" } }, SEVERAL ? make("h3", {}, swatch(run), run.label) : null,
      make("p", { class: "quiet" }, `${whole(run.choices.count)} choices, ${whole(Math.max(0, changes.length - 1))} changes${changes.length > 40 ? "; the latest 40 are shown" : ""}.`),
      make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ["version", "time", "quorum", "reason"].map((name) => make("th", { class: name === "reason" ? "text" : "" }, name)))),
        make("tbody", {}, changes.slice(-40).map((one) => make("tr", {}, make("td", {}, whole(one.version)), make("td", {}, seconds(one.time)), make("td", {}, whole(one.quorum)), make("td", { class: "text wrap" }, one.reason))))))));
  }
}

function stairs(run) {
  const xs = [], ys = [];
  run.choices.changes.forEach((one, index, all) => {
    const until = index + 1 < all.length ? all[index + 1].time : run.summary.seconds;
    xs.push(one.time, Math.max(one.time, until - 1e-9));
    ys.push(one.quorum, one.quorum);
  });
  return { xs, ys };
}

function showPlan() {
  const plan = DATA.plan;
  if (!plan && !DATA.no_plan) return;
  const choice = plan && plan.choice, from = plan && plan.run !== null && SEVERAL ? `From ${RUNS[plan.run].label}. ` : "";
  const holder = section("plan", "How many backups", null);
  if (!plan) { holder.append(make("p", { class: "absent" }, "The planner says: " + DATA.no_plan + ".")); return; }
  if (choice) {
    const split = choice.quorum === null || choice.backups === null ? choice.policy : `${choice.quorum}+${choice.backups}`;
    holder.append(make("p", { "data-choice": split }, `${from}Of ${whole(plan.machines)} machines: `, make("strong", {}, split), choice.reason ? `, since ${choice.reason}.` : "."));
  }
  if (plan.changes.length) holder.append(make("p", { class: "quiet" }, "It would be otherwise: " + plan.changes.join("; ") + "."));
  for (const words of plan.notes) holder.append(make("p", { class: "quiet" }, sentence(words.replace(/\.$/, ""))));
  const marks = choice && choice.backups !== null ? [{ x: choice.backups, label: `${choice.quorum}+${choice.backups}`, colour: "#D55E00" }] : [];
  const grid = make("div", { class: "grid" }), later = [];
  holder.append(grid);
  const over = (title, series, yText, band) => {
    if (series[series.length - 1].ys.every((value) => value === null)) return;
    const plot = make("div");
    grid.append(card(title, plot));
    later.push(() => chart(plot, (target) => lines(target, { series, band, marks, xLabel: "backups of " + whole(plan.machines) + " machines", xText: (value) => (Number.isInteger(value) ? whole(value) : ""), yText, fromZero: true })));
  };
  const line = (label, ys, thin) => ({ label, ys, xs: plan.backups, colour: "#0072B2", thin, points: thin ? false : plan.backups.length <= 24 });
  const best = Math.min(...plan.time.filter((value) => value !== null));
  over("time to the target, over the best split", [line("time", plan.time.map((value) => (value === null ? null : value / best)))], (value) => "×" + number(value), null);
  over("seconds per update, with its interval", [line("low", plan.low, true), line("high", plan.high, true), line("mean", plan.mean)], seconds, [0, 1]);
  later.forEach((draw) => draw());
}

// ---------------------------------------------------------------- all of it

showRuns();
if (RUNS.some((run) => run.summary.updates)) {
  for (const show of [showComparison, showLearning, showArrivals, showTimelines, showWorkers, showStaleness, showBytes, showChoices]) show();
}
showPlan();
REPORT.append(make("footer", {}, `Made by quorate report${DATA.quorate ? " of runs by quorate " + DATA.quorate : ""} from the traces of these runs. This page asks the network for nothing.`));

let resizing = null;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => redrawAll(true), 120); });
for (const looks of ["(prefers-color-scheme: dark)", "print"]) matchMedia(looks).addEventListener("change", () => redrawAll(false));
// Ready when what was drawn has been painted.
requestAnimationFrame(() => requestAnimationFrame(() => {
  window.reportReadyMs = performance.now();
  document.documentElement.dataset.ready = "yes";
}));
