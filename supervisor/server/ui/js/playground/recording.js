// The microphone as a WAV file: 16 kHz, mono, 16 bit. Browsers record in formats of their own; this one every server reads.

const RATE = 16000;

/** Begin to record. Resolves, once allowed, to a function that ends it and resolves to the file. */
export async function record() {
  if (!navigator.mediaDevices) throw new Error("The browser gives the microphone only to pages from this machine or by https.");
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true } });
  const recorder = new MediaRecorder(stream);
  const pieces = [];
  recorder.ondataavailable = ({ data }) => pieces.push(data);
  recorder.start();
  return async () => {
    const ended = new Promise((resolve) => recorder.addEventListener("stop", resolve, { once: true }));
    recorder.stop();
    await ended;
    for (const track of stream.getTracks()) track.stop();
    return wav(await new Blob(pieces).arrayBuffer());
  };
}

async function wav(encoded) {
  const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(encoded); // resamples to its own rate
  const samples = decoded.getChannelData(0);
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, value) => [...value].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, index) => view.setInt16(44 + 2 * index, Math.max(-1, Math.min(1, sample)) * 32767, true));
  return new File([view.buffer], "recording.wav", { type: "audio/wav" });
}
