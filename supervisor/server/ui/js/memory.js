// A bar per device: the lease of each worker (pale), its measured memory (full), the memory of other programs, and the free memory.

import { html } from "../vendor/htm-preact.js";
import { mib } from "./format.js";
import { state } from "./live.js";
import { hue } from "./colours.js";
import { href } from "./route.js";
import { baseOf } from "./state.js";

const share = (part, whole) => `${whole ? Math.min(100, Math.max(0, (100 * part) / whole)) : 0}%`;

function Lease({ lease, total }) {
  const size = Math.max(lease.lease_mib, lease.measured_mib ?? 0);
  const label = `${lease.model}: ${mib(lease.measured_mib)} measured of ${mib(lease.lease_mib)} leased`;
  return html`<div class=${`segment ${hue(lease.model)} ${lease.phase}`} style=${{ width: share(size, total) }} title=${label} data-model=${lease.model}>
    <i style=${{ width: share(lease.measured_mib ?? 0, size) }} />
  </div>`;
}

function trouble(device) {
  if (device.blocked) return device.blocked === true ? "blocked" : device.blocked;
  return device.quarantined ? "quarantined: its numbers don't add up" : null;
}

function Device({ device }) {
  const total = device.total_mib;
  const leased = device.leases.reduce((sum, lease) => sum + Math.max(lease.lease_mib, lease.measured_mib ?? 0), 0);
  const outside = device.outside_mib ?? 0;
  const free = Math.max(0, total - leased - outside);
  const summary = `${device.id}: ${mib(leased)} leased to ${device.leases.length} workers and partners, ${mib(outside)} used by others, ${mib(free)} free of ${mib(total)}`;
  const problem = trouble(device);
  return html`<section class="device" aria-label=${`Memory of ${device.id}`}>
    <header>
      <h3>${device.id}</h3>
      <span class="muted">${device.name}${device.driver ? ` · driver ${device.driver}` : ""}</span>
      ${problem && html`<span class="badge bad">${problem}</span>`}
      <span class="total"><b>${mib(free)}</b> free of ${mib(total)}</span>
    </header>
    <div class="bar" role="img" aria-label=${summary}>
      ${device.leases.map((lease) => html`<${Lease} key=${`${lease.model}:${lease.generation}`} lease=${lease} total=${total} />`)}
      ${outside > 0 && html`<div key="outside" class="segment outside" style=${{ width: share(outside, total) }} title=${`Others: ${mib(outside)}`} />`}
      ${device.margin_mib > 0 && html`<div key="margin" class="segment margin" style=${{ width: share(Math.min(free, device.margin_mib), total) }} title=${`Margin always left free: ${mib(device.margin_mib)}`} />`}
    </div>
    <ul class="legend">
      ${device.leases.map(
        (lease) => html`<li key=${`${lease.model}:${lease.generation}`} class=${hue(lease.model)}>
          <i class="swatch" />${lease.partner ? lease.model : html`<a href=${href("models", baseOf(lease.model))}>${lease.model}</a>`}
          <span class="num">${lease.measured_mib === null ? "" : html`<b>${mib(lease.measured_mib)}</b> of `}${mib(lease.lease_mib)}</span>
          ${lease.phase !== "held" && html`<span class="muted">${lease.phase}</span>`}
        </li>`,
      )}
      ${outside > 0 && html`<li key="outside" class="other"><i class="swatch" />outside llmux <span class="num">${mib(outside)}</span></li>`}
      ${device.margin_mib > 0 && html`<li key="margin" class="spare"><i class="swatch" />margin <span class="num">${mib(device.margin_mib)}</span></li>`}
    </ul>
  </section>`;
}

export const Memory = () => html`<section class="panel" aria-labelledby="memory-title">
  <h2 id="memory-title">Memory <small>full colour measured, pale leased</small></h2>
  ${state.devices.map((device) => html`<${Device} key=${device.id} device=${device} />`)}
</section>`;
