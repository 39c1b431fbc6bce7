"use strict";
// The sections of the report. A section without data is replaced by a line that gives the reason.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs, SEVERAL = RUNS.length > 1;
const REPORT = document.getElementById("report");
const SECONDS = DATA.seconds === "virtual" ? "virtual seconds" : "seconds";

function section(id, title, words) {
  const holder = make("section", { id }, make("h2", {}, title), words ? make("p", { class: "quiet" }, words) : null);
  REPORT.append(holder);
  return holder;
}

/** A card as wide as the page, about one run. */
function wideCard(run, ...inside) {
  return make("div", { class: "card", style: { marginTop: "12px" } }, SEVERAL ? make("h3", {}, swatch(run), run.label) : null, ...inside);
}

function table(headings, body) {
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, headings)), body));
}

/** Append a card with a chart; returns the chart. */
function chartCard(holder, title, draw, words) {
  const plot = make("div");
  holder.append(make("figure", { class: "card" }, make("h3", {}, title), words ? make("p", { class: "quiet" }, words) : null, plot));
  return chart(plot, draw);
}

/** One line with the runs that lack some data, and the reason for each. */
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

function boxes(...kinds) {
  return make("div", { class: "legend" }, kinds.map(([kind, words]) => make("span", {}, make("span", { class: "box", style: { background: `var(--${kind})` } }), words)));
}

// ---------------------------------------------------------------- the runs

function showRuns() {
  REPORT.append(make("h1", {}, SEVERAL ? `${RUNS.length} runs side by side` : RUNS[0].label));
  REPORT.append(make("p", { class: "quiet" }, SEVERAL ? RUNS.map((run) => run.label).join(" · ") : RUNS[0].name));
  for (const words of DATA.notes) REPORT.append(make("p", { class: "notice" }, words));
  showFindings();
  const grid = make("div", { class: SEVERAL ? "grid" : "", id: "runs", style: { marginTop: "14px" } });
  for (const run of RUNS) grid.append(runCard(run));
  REPORT.append(grid);
}

/** The findings: slow workers, their cost, the advice, and the command to type. */
function showFindings() {
  const holder = make("section", { id: "findings", "aria-label": "findings" });
  for (const run of RUNS) {
    if (SEVERAL && run.findings.length) holder.append(make("h3", {}, swatch(run), run.label));
    for (const one of run.findings) {
      holder.append(make("div", { class: "finding " + one.kind, "data-finding": one.kind }, make("p", {}, one.text),
        one.command ? make("code", { class: "command" }, commandWords(one.command)) : null));
    }
  }
  REPORT.append(holder);
}

function runCard(run) {
  const engine = run.engine, facts = run.measured ? [`step times of ${run.workers} processes`, run.has_all_reduce ? "a step ends with the all-reduce" : "the all-reduce is not in the table"] : [
    run.task ? `task ${run.task}` : run.subject,
    `${run.workers} ${run.workers === 1 ? "worker" : "workers"}`,
    engine.name === "simulated" ? "simulated, virtual seconds" : `${engine.name} engine, real seconds`,
    engine.latency ? `${engine.name === "simulated" ? "latency" : "artificial delays"} ${engine.latency}` : null,
    engine.network ? `network ${engine.network}` : null,
    engine.faults ? `faults ${engine.faults}` : null,
    `seed ${run.seed}`,
    run.end === null ? "broke off" : `ended: ${run.end}`,
  ].filter(Boolean);
  const broke = run.left_out ? make("p", { class: "notice" }, run.left_out + ".") : null;
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
  if (!summary.updates) return [];
  if (run.measured) {
    return [
      ["steps", whole(summary.updates), `in ${seconds(summary.seconds)}`],
      ["a step took", seconds(took.mean), `median ${seconds(took.median)}, 99\u00a0% within\u00a0${seconds(took.p99)}`],
      ["processes waited", share(work.idle / spent), run.has_all_reduce ? "for the slowest, and the all-reduce" : "for the slowest one of each step"],
    ];
  }
  const figures = [
    ["updates", whole(summary.updates), `in ${seconds(summary.seconds)}`],
    ["an update took", seconds(took.mean), `median ${seconds(took.median)}, 99\u00a0% within\u00a0${seconds(took.p99)}`],
    ["samples per second", number(run.samples_per_s), `${whole(summary.samples.applied)} in all`],
    ["tickets applied", whole(tickets.applied), `${share(tickets.applied / ended)} of ${whole(all)}`],
    ["dropped", share(tickets.dropped / ended), !tickets.dropped ? "none" : `${whole(tickets.dropped)}, ${tickets.cancelled === tickets.dropped ? "all" : whole(tickets.cancelled) + " of them"} cancelled`],
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
    table(columns.map(([title]) => make("th", {}, title)),
      make("tbody", {}, DATA.comparison.map((row, index) => make("tr", {}, columns.map(([, cell], place) =>
        make("td", {}, place === 0 ? swatch(RUNS[index]) : null, cell(row))))))));
}

// ---------------------------------------------------------------- learning curves

const AXES = { time: [SECONDS, number], updates: ["updates", whole], samples: ["samples", whole] };

function showLearning() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.measures)))];
  const holder = section("learning", "What was learned", null);
  const missing = [absentLine("learning"), absentLine("measures")].filter(Boolean);
  if (!names.length && !RUNS.some((run) => run.loss)) { holder.append(...missing); return; }
  const state = { x: "time", smooth: true, log: false };
  const charts = [];
  const again = () => charts.forEach((entry) => entry.again());
  const positive = RUNS.every((run) => !run.loss || run.loss.value.every((value) => value === null || value > 0));
  holder.append(make("div", { class: "controls" },
    radios("x-axis", "over", [["time", "time"], ["updates", "updates"], ["samples", "samples"]], "time", (value) => { state.x = value; again(); }),
    RUNS.some((run) => run.loss) ? tick("smooth the loss", true, (on) => { state.smooth = on; again(); }) : null,
    positive && RUNS.some((run) => run.loss) ? tick("logarithmic loss", false, (on) => { state.log = on; again(); }) : null), ...missing);
  const grid = make("div", { class: "grid" });
  holder.append(grid);
  const curve = (title, of, isLoss) => {
    charts.push(chartCard(grid, title, (target) => lines(target, {
      series: RUNS.filter(of).map((run) => ({
        label: SEVERAL ? run.label : title, colour: run.colour, dashed: run.dashed, xs: of(run)[state.x],
        ys: isLoss && state.smooth ? smoothed(of(run).value) : of(run).value,
      })),
      xLabel: AXES[state.x][0], xText: AXES[state.x][1], yText: measure, logY: isLoss && state.log,
    })));
  };
  for (const name of names) curve(spoken(name), (run) => run.measures[name], false);
  if (RUNS.some((run) => run.loss)) curve("training loss", (run) => run.loss, true);
}

/** Moving average over a fiftieth of the points. */
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

// ---------------------------------------------------------------- arrival times

function showArrivals() {
  const timed = RUNS.filter((run) => run.arrivals);
  const holder = section("arrivals", "When the gradients of a round arrive",
    !timed.length ? null : RUNS[0].measured ? "Time from the start of a step to the k-th process that is done with it." : "Time from a new version to the k-th gradient of it. Where late work is cancelled, gradients beyond the quorum are never seen. Click a name under a chart to hide or show its line.");
  holder.append(absentLine("arrivals") || "");
  if (!timed.length) return;
  let run = timed[0];
  const grid = make("div", { class: "grid" });
  if (timed.length > 1) {
    holder.append(make("div", { class: "controls" }, make("label", {}, "distribution of ", make("select", {
      onchange: (event) => { run = timed[event.target.value]; distribution.again(); },
    }, timed.map((one, index) => make("option", { value: index }, one.label))))));
  }
  holder.append(grid);
  const distribution = chartCard(grid, "share of rounds in which the k-th gradient is there", (target) => {
    const chosen = run.arrivals.chosen;
    const last = Math.max(...chosen.map((one) => one.seconds[one.seconds.length - 3]));
    const plot = lines(target, {
      series: chosen.map((one, place) => ({ label: "k = " + one.k, colour: shade(place, chosen.length), xs: one.seconds, ys: one.share, points: false })),
      xLabel: run.seconds_are === "virtual" ? "virtual seconds" : "seconds", yText: share, yRange: [0, 1],
    });
    plot.setScale("x", { min: 0, max: last * 1.05 });
    return plot;
  });
  chartCard(grid, "mean time to the k-th gradient", (target) => lines(target, {
    series: timed.map((one) => ({ label: one.label, colour: one.colour, dashed: one.dashed, xs: one.arrivals.means.map((_, index) => index + 1), ys: one.arrivals.means, points: one.arrivals.means.length <= 24 })),
    xLabel: "k", xText: (value) => (Number.isInteger(value) ? whole(value) : ""), yText: seconds, fromZero: true,
    marks: timed.filter((one) => one.policy.quorum && one.policy.quorum < one.workers).map((one) => ({ x: one.policy.quorum, label: "quorum of " + one.label, colour: one.colour })),
  }));
}

// ---------------------------------------------------------------- workers

function showTimelines() {
  const holder = section("timeline", "What the workers did", "Drag to zoom in, Shift and drag to move, double-click for the whole run; or Ctrl and the wheel, or + − ← → when the picture has the focus. From afar a row shows shares of its time; close up, every ticket.");
  const kinds = ["used", "dropped", "cancelled", "lost", "gone", "waiting"];
  holder.append(boxes(...kinds.map((kind) => [kind, KIND_WORDS[kind]])));
  const longest = Math.max(...RUNS.map((run) => run.timeline.seconds)), views = [];
  const shared = SEVERAL && DATA.seconds !== "mixed";
  if (SEVERAL) {
    holder.append(make("div", { class: "controls" }, tick("one time axis for all", shared, (on) => {
      for (const view of views) { view.seconds = on ? longest : view.data.seconds || 1; view.show(0, view.seconds); }
    })));
  }
  for (const run of RUNS) {
    const data = run.timeline, picture = make("div", { class: "timeline" }), says = make("div", { class: "says" });
    const view = new WorkerTimeline(picture, says, data, shared ? longest : 0);
    views.push(view);
    const button = (name, does) => make("button", { type: "button", onclick: () => does(view) }, name);
    const words = data.workers_per_row > 1 ? `A row is ${data.workers_per_row} workers: there are too many to show single tickets.`
      : data.whole ? null : `Single tickets are kept for the beginning, the end and the slowest stretches (${whole(data.segments)} of them); elsewhere the picture stays an outline.`;
    holder.append(wideCard(run, words ? make("p", { class: "quiet" }, words) : null, make("div", { class: "controls" },
      button("whole run", (one) => one.show(0, one.seconds)),
      data.moments.map((moment) => button(moment.name, (one) => one.show(moment.from, moment.to))),
      button("+", (one) => one.zoom(0.5)), button("−", (one) => one.zoom(2)), button("←", (one) => one.move(-0.5)), button("→", (one) => one.move(0.5))), picture, says));
  }
}

function showWorkers() {
  const holder = section("workers", "Who is slow, and in what",
    RUNS[0].measured ? "Slowness is a process's median step against the usual one's. Click a heading to sort."
      : "Slowness is a worker's median ticket against the usual worker's; a ticket that was cancelled counts as at least as long as it ran. Click a heading to sort.");
  holder.append(absentLine("parts") || "", boxes(["used", RUNS[0].measured ? "at work" : "used"], ...(RUNS[0].measured ? [] : [["dropped", "computed, not used"]]), ["waiting", "waiting"]));
  for (const run of RUNS) {
    if (run.worker_rows.length) holder.append(workerTable(run));
    if (run.heat) heatCard(holder, run);
  }
}

function heatCard(holder, run) {
  const plot = make("div", { class: "heat" }), says = make("div", { class: "says" });
  holder.append(make("figure", { class: "card", style: { marginTop: "12px" } }, make("h3", {}, SEVERAL ? swatch(run) : null, `worker × ${run.steps_are}: time of a ${run.tickets_are} against the usual one, ${seconds(run.heat.usual_s)}`),
    boxes(...HEAT.map(([ratio, name]) => [name, "×" + ratio + (ratio === 8 ? " or more" : "")])), plot, says));
  chart(plot, (target) => heatMap(target, says, run.heat, run.steps_are, run.first_step));
}

function workerTable(run) {
  const parts = run.has_parts ? Object.keys(run.part_words).filter((name) => run.worker_rows.some((row) => row.parts_s && name in row.parts_s))
    .map((name) => [run.part_words[name].replace(/^the | pass$|'s step$/g, ""), (row) => (row.parts_s ? row.parts_s[name] : null), seconds]) : [];
  const columns = [
    ["worker", (row) => row.worker, String],
    ["slowness", (row) => row.slowness, (value, row) => (value === null ? NOTHING : (row.median_s === null ? "≥ " : "") + "×" + value.toFixed(2))],
    ...(run.worker_rows.some((row) => row.slow_in) ? [["slow in", (row) => row.slow_in || "", (value) => (value ? (run.part_words[value] || value).replace(/^the /, "") : NOTHING)]] : []),
    ["median " + run.tickets_are, (row) => (row.median_s === null ? row.at_least_s : row.median_s), (value, row) => (row.median_s === null && value !== null ? "> " : "") + seconds(value)],
    ["90 % within", (row) => row.p90_s, seconds],
    ...parts,
    [run.measured ? "steps" : "used", (row) => row.applied, whole], ...(run.measured ? [] : [["dropped", (row) => row.dropped, whole]]),
    ...(run.worker_rows.some((row) => row.lost) ? [["lost", (row) => row.lost, whole]] : []),
    ["where its time went", (row) => (row.live_s ? row.idle_s / row.live_s : 0), (value, row) => timeBar(row)],
  ];
  let sorted = 1, down = true, all = false;
  const body = make("tbody"), more = make("button", { type: "button", onclick: () => { all = !all; fill(); } });
  const fill = () => {
    const rows = [...run.worker_rows].sort((one, other) => {
      const [a, b] = [columns[sorted][1](one), columns[sorted][1](other)];
      const order = a === null ? 1 : b === null ? -1 : typeof a === "string" ? (down ? b.localeCompare(a) : a.localeCompare(b)) : down ? b - a : a - b;
      return order || one.worker - other.worker;
    });
    body.replaceChildren(...rows.slice(0, all ? rows.length : 12).map((row) => make("tr", { "data-worker": row.worker, class: row.slowness >= DATA.slow ? "slow" : "" }, columns.map(([name, value, words]) =>
      make("td", { class: ["slowness", "slow in"].includes(name) ? "flag" : "" }, words(value(row), row))))));
    more.textContent = all ? "show the first 12" : `show all ${rows.length}`;
    more.hidden = rows.length <= 12;
  };
  fill();
  const headings = columns.map(([name], index) => make("th", { class: "sortable" + (name.startsWith("where") ? " text" : ""), onclick: () => { down = sorted === index ? !down : index > 0; sorted = index; fill(); } }, name));
  const left = run.worker_rows_left_out;
  return wideCard(run, table(headings, body), make("p", {}, more), left ? make("p", { class: "quiet" }, `${whole(left)} quicker workers are left out.`) : null);
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
  if (SEVERAL) holder.append(make("div", { class: "legend" }, RUNS.map((run) => make("span", {}, swatch(run), run.label))));
  chartCard(holder, "share of applied gradients by staleness", (target) => bars(target, {
    groups, xLabel: "versions made between reading and applying", valueText: share,
    series: RUNS.map((run) => ({ label: run.label, colour: run.colour, values: run.staleness.map((bar) => bar.tickets / run.summary.tickets.applied) })),
  }));
}

function showBytes() {
  const holder = section("bytes", "Bytes", null);
  holder.append(absentLine("bytes") || "");
  const sending = RUNS.filter((run) => run.summary.bytes.sent);
  if (!sending.length) return;
  const most = Math.max(...sending.map((run) => run.summary.bytes.sent));
  holder.append(boxes(["used", "used"], ["dropped", "wasted: for gradients that were dropped or lost"]));
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
  chartCard(holder, "quorum", (target) => lines(target, {
    series: choosing.map((run) => ({ label: run.label, colour: run.colour, dashed: run.dashed, points: false, ...stairs(run) })),
    xLabel: SECONDS, xText: number, yText: whole, fromZero: true,
  }));
  for (const run of choosing) {
    const changes = run.choices.changes;
    holder.append(wideCard(run,
      make("p", { class: "quiet" }, `${whole(run.choices.count)} choices, ${whole(Math.max(0, changes.length - 1))} changes${changes.length > 40 ? "; the latest 40 are shown" : ""}.`),
      table(["version", "time", "quorum", "reason"].map((name) => make("th", { class: name === "reason" ? "text" : "" }, name)),
        make("tbody", {}, changes.slice(-40).map((one) => make("tr", {}, make("td", {}, whole(one.version)), make("td", {}, seconds(one.time)), make("td", {}, whole(one.quorum)), make("td", { class: "text wrap" }, one.reason)))))));
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
  if (!plan) return; // the findings give the reason
  const choice = plan.choice, from = plan.run !== null && SEVERAL ? `From ${RUNS[plan.run].label}. ` : "";
  const holder = section("plan", "How many backups", null);
  if (choice) {
    const split = choice.quorum === null || choice.backups === null ? choice.policy : `${choice.quorum}+${choice.backups}`;
    holder.append(make("p", { "data-choice": split }, `${from}Of ${whole(plan.machines)} machines: `, make("strong", {}, split), choice.reason ? `, since ${choice.reason}.` : "."));
  }
  if (plan.changes.length) holder.append(make("p", { class: "quiet" }, "It would be otherwise: " + plan.changes.join("; ") + "."));
  for (const words of plan.notes) holder.append(make("p", { class: "quiet" }, sentence(words.replace(/\.$/, ""))));
  if (choice && choice.is_kept) { // no other split can be judged from the run
    holder.append(make("p", { class: "quiet" }, "Figures of other splits are left out, as they do not hold; quorate plan --all shows them."));
    return;
  }
  const grid = make("div", { class: "grid" });
  holder.append(grid);
  const chosen = choice ? plan.backups.indexOf(choice.backups) : -1;
  const marks = chosen < 0 ? [] : [{ x: choice.backups, label: `${choice.quorum}+${choice.backups}`, colour: "#D55E00", top: true }];
  const best = chosen < 0 ? Math.min(...plan.time.filter((value) => value !== null)) : plan.time[chosen];
  const relative = (seconds) => seconds.map((value, index) => (value === null || plan.time[index] === null || !plan.mean[index] ? null : ((value / plan.mean[index]) * plan.time[index]) / best));
  const near = closeTo(relative(plan.mean), relative(plan.low), chosen);
  const curve = (title, words, yText, [low, mean, high], more) => {
    if (mean.every((value) => value === null)) return;
    const line = (label, ys, thin) => ({ label, ys, xs: plan.backups, colour: "#0072B2", thin, points: thin ? false : plan.backups.length <= 60 });
    chartCard(grid, title, (target) => lines(target, {
      series: [line("least", low, true), line("most", high, true), line("mean", mean)], band: [0, 1], marks, yText,
      xLabel: "backups of " + whole(plan.machines) + " machines", xText: (value) => (Number.isInteger(value) ? whole(value) : ""), ...more,
    }), words);
  };
  const rel = [plan.low, plan.mean, plan.high].map(relative);
  const tie = chosen < 0 ? null : [rel[0][chosen], rel[2][chosen]];
  const words = tie ? `The band is the 95\u00a0% interval. A split whose band reaches into the stripe is as good as ${choice.quorum}+${choice.backups}.` + (near.cut ? " Splits that take longer are off the chart." : "") : null;
  curve("time to the target, as a multiple of the chosen split's", words, (value) => "×" + value.toFixed(2), rel, { stripe: tie, xRange: near.xs && near.xs.map((index) => plan.backups[index]), yRange: near.ys });
  curve("seconds per update, with its 95\u00a0% interval", null, seconds, [plan.low, plan.mean, plan.high], { fromZero: true });
}

/** The range of the chart around the chosen split in which a difference of one per cent is visible. */
function closeTo(times, lows, chosen) {
  const seen = times.filter((value) => value !== null), least = Math.min(...seen, ...lows.filter((value) => value !== null)), most = Math.max(...seen);
  if (chosen < 0 || !seen.length) return { xs: null, ys: null, cut: false };
  const top = Math.min(most, Math.max(1.15, 1 + 3 * Math.abs(1 - least)));
  const inside = times.map((value, index) => (value !== null && value <= top ? index : -1)).filter((index) => index >= 0);
  const xs = [Math.max(0, Math.min(...inside) - 1), Math.min(times.length - 1, Math.max(...inside) + 1)];
  const room = (top - least) * 0.08 || 0.01;
  return { xs: xs[1] > xs[0] ? xs : null, ys: [least - room, top + room], cut: most > top + room };
}

// ---------------------------------------------------------------- the whole page

showRuns();
if (RUNS.some((run) => run.summary.updates)) {
  showComparison();
  const learned = [showLearning], workers = [showWorkers, showPlan];
  const shown = RUNS[0].measured ? [...workers, showArrivals, showTimelines] : [
    ...(SEVERAL ? [...learned, ...workers] : [...workers, ...learned]), showArrivals, showTimelines, showStaleness, showBytes, showChoices];
  for (const show of shown) show();
}
REPORT.append(make("footer", {}, `Made by quorate report from ${RUNS[0].measured ? "the step times of a script" : `the traces of these runs${DATA.quorate ? ", by quorate " + DATA.quorate : ""}`}. This page asks the network for nothing.`));

redrawAll(false);
let resizing = null;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => redrawAll(true), 120); });
for (const looks of ["(prefers-color-scheme: dark)", "print"]) matchMedia(looks).addEventListener("change", () => redrawAll(false));
// The page is ready after the drawings have been painted.
requestAnimationFrame(() => requestAnimationFrame(() => {
  window.reportReadyMs = performance.now();
  document.documentElement.dataset.ready = "yes";
}));
