// A time that Play, the scrubber and the keys move.
//
// A page that uses this has `state.time`, and the functions draw() for all that it shows, showMoment() for what changes
// with time, clock(time) for its words, pace() for how much of it passes in a second, and silence() for the Escape key.

let horizon = 1; // when all that is shown has ended
let moments = []; // when anything starts or ends, for stepping

let place; // where time runs: {width, left, right} in pixels
const x = (t) => place.left + t / horizon * (place.width - place.left - place.right);

/** The scrubber is the time axis: its thumb stands above the cursor of every chart. */
function drawAxis(beside, label = number) {
  const thumb = 16;
  $("time").max = horizon;
  $("time").style.marginLeft = `${place.left - thumb / 2}px`;
  $("time").style.width = `${x(horizon) - x(0) + thumb}px`;
  const rough = horizon / (place.width / 90);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const ticks = Array.from({ length: Math.floor(horizon / step + 1e-9) + 1 }, (_, i) => i * step);
  $("axis").innerHTML = ticks.map((t) => `<text x="${x(t)}" y="12">${label(t)}</text>`).join("")
    + `<text x="${place.width}" y="12" text-anchor="end">${beside}</text>`;
}

function seek(time) {
  state.time = Math.min(Math.max(time, 0), horizon);
  $("time").value = state.time;
  $("now").textContent = clock(state.time);
  $("time").setAttribute("aria-valuetext", $("now").textContent);
  showMoment();
}

let nextFrame = null; // while it plays

function play(playing) {
  cancelAnimationFrame(nextFrame);
  nextFrame = null;
  if (playing) {
    if (state.time >= horizon) seek(0);
    let before = performance.now();
    nextFrame = requestAnimationFrame(function frame(now) {
      seek(state.time + Math.max(0, now - before) / 1000 * pace() * Number($("speed").value));
      before = now;
      if (state.time >= horizon && linked.embed) seek(0);
      else if (state.time >= horizon) play(false);
      else nextFrame = requestAnimationFrame(frame);
    });
  }
  $("play").textContent = nextFrame ? "Pause" : "Play";
}

/** To the next moment at which something starts or ends, or to the one before. */
function step(forwards) {
  play(false);
  const tiny = horizon * 1e-9;
  const next = forwards ? moments.find((t) => t > state.time + tiny)
    : moments.filter((t) => t < state.time - tiny).pop();
  seek(next ?? (forwards ? horizon : 0));
}

$("play").addEventListener("click", () => play(!nextFrame));
$("time").addEventListener("input", () => { play(false); seek(Number($("time").value)); });

document.addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  // What has a meaning of its own for space or arrows keeps it while it is in use by keyboard.
  const own = key === " " ? "select, button, summary, a, #settings input" : "select, .scroll, #settings input";
  if (target.matches?.(own) && target.matches(":focus-visible")) return;
  const does = {
    " ": () => play(!nextFrame), ArrowRight: () => step(true), ArrowLeft: () => step(false),
    Home: () => seek(0), End: () => seek(horizon), Escape: silence,
  }[key];
  if (!does) return;
  event.preventDefault();
  does();
});

/** Go to the time at which the pointer is, where it is on a time axis. */
function scrub({ target, clientX }) {
  const inside = clientX - $("charts").getBoundingClientRect().left - place.left;
  if (inside < 0 || !target.closest("svg")) return;
  play(false);
  seek(inside / (x(horizon) - x(0)) * horizon);
}
$("charts").addEventListener("pointerdown", scrub);
$("charts").addEventListener("pointermove", (event) => { if (event.buttons) scrub(event); });

const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
addEventListener("load", () => { if (linked.embed === "playing" && !isStill) play(true); });

addEventListener("resize", () => { if ($("charts").clientWidth !== place.width) draw(); });
