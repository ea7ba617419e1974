// Pages that are read from a file may not start a Worker: the search runs in a hidden frame instead.
"use strict";

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.waiting = [];
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    this.frame.srcdoc = "<!doctype html><title>search</title>";
    this.frame.onload = () => this.start(url);
    document.body.append(this.frame);
  }

  start(url) {
    this.frame.onload = null;
    const inside = this.frame.contentWindow;
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
    this.load(url).then(() => {
      this.ready = true;
      this.waiting.forEach((data) => this.postMessage(data));
    });
  }

  load(url) {
    const script = this.frame.contentDocument.createElement("script");
    script.src = url;
    this.frame.contentDocument.body.append(script);
    return new Promise((done, failed) => {
      script.onload = done;
      script.onerror = failed;
    });
  }

  postMessage(data) {
    if (this.ready) this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    else this.waiting.push(data);
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
