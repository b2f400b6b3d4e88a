// Each model's colour, the same wherever it is shown. Only models that hold memory, or did so within the charts, have one:
// so no two loaded ones look alike, up to twelve of them, however many are configured.

import { baseOf, state, subscribe } from "./state.js";

const COLOURS = 12; // --hue-0 and so on
const STEP = 5; // neighbours in the row of colours look alike, those so far apart don't
const LOADED = 1000; // how much more it counts that a loaded model has a colour
const MEMORY = "worker_memory_mib:"; // before a device, a slash and a model
const taken = new Map(); // names of models, their colours

/** The physical model behind a public name. */
export function physical(name) {
  return state.models.get(baseOf(name)) ?? [...state.models.values()].find((model) => model.virtual_models.includes(name));
}

/** The colour that the name itself leads to, so that it mostly stays the same from visit to visit. */
function preferred(name) {
  let sum = 7;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) % 65521;
  return sum % COLOURS;
}

/** Give every model that is shown a colour, in the order of their names: the next visit finds them the same. Those loaded come
 * first; one that comes back while another loaded one has its old colour takes a new one. */
function assign() {
  const leased = (state.devices ?? []).flatMap(({ leases }) => leases.filter(({ partner }) => partner).map(({ model }) => model));
  const loaded = new Set([...state.models.values()].filter(({ memory }) => memory.lease_mib !== null).map(({ name }) => name).concat(leased).sort());
  const most = Math.ceil(loaded.size / COLOURS) * LOADED; // of a colour
  const series = Object.keys(state.history?.series ?? {}).filter((name) => name.startsWith(MEMORY));
  const shown = new Set([...loaded, ...series.map((name) => name.slice(name.indexOf("/") + 1)).sort()]);
  const uses = Array(COLOURS).fill(0);
  const take = (name, colour) => {
    taken.set(name, colour);
    uses[colour] += loaded.has(name) ? LOADED : 1;
  };
  const before = new Map(taken);
  taken.clear();
  for (const name of shown) {
    const colour = before.get(name);
    if (colour !== undefined && (uses[colour] < most || !loaded.has(name))) take(name, colour);
  }
  for (const name of shown) {
    if (taken.has(name)) continue;
    const row = uses.map((_, tries) => (preferred(name) + tries * STEP) % COLOURS);
    take(name, row.reduce((best, colour) => (uses[colour] < uses[best] ? colour : best)));
  }
}

subscribe(assign);

/** The class of a model's colour, under whichever of its names; "" where it has none. */
export function hue(name) {
  const colour = taken.get(physical(name)?.name ?? name); // a partner's lease is no model
  return colour === undefined ? "" : `hue-${colour}`;
}
