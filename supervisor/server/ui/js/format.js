// Numbers, times and sizes as people read them.

export function mib(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10240) return `${(value / 1024).toFixed(1)} GiB`;
  return `${Math.round(value)} MiB`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

export const time = (epoch) => clock.format(new Date(epoch * 1000));

export const now = () => Date.now() / 1000;

const NORMAL = 50;

/** For whom a request came, and how urgent it is where that isn't usual. */
export const asker = ({ key, tenant, priority }) =>
  [tenant ?? key, priority != null && priority !== NORMAL && `priority ${priority}`].filter(Boolean).join(" · ");

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
