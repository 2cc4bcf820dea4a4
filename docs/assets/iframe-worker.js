// Search runs in a Worker, which browsers do not start for pages that are opened as files. There, an invisible frame
// executes the same script. The site loads this file instead of the package of the same name from a server.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
      const script = inner.document.createElement("script");
      script.src = url;
      script.onload = () => this.start();
      script.onerror = (event) => this.onerror?.(event);
      inner.document.body.append(script);
    }

    start() {
      const waiting = this.waiting;
      this.waiting = undefined;
      waiting.forEach((data) => this.postMessage(data));
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else setTimeout(() => this.frame.contentWindow?.onmessage?.({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
