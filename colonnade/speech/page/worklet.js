// Collects the microphone's samples in runs of 80 ms, with the time of the first one on the context's clock.
const RUN = 1280;

class Collector extends AudioWorkletProcessor {
  constructor() {
    super();
    this.run = new Int16Array(RUN);
    this.length = 0;
    this.start = 0;
  }

  process(inputs) {
    const samples = inputs[0][0];
    if (!samples) return true;
    samples.forEach((sample, i) => {
      if (!this.length) this.start = currentTime + i / sampleRate;
      this.run[this.length++] = Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
      if (this.length === RUN) {
        this.port.postMessage({start: this.start, samples: this.run.slice()});
        this.length = 0;
      }
    });
    return true;
  }
}

registerProcessor("collector", Collector);
