import { App } from "./app.js";
import { EmbeddedSource, ServerSource } from "./source.js";

const report = document.getElementById("gradtrace-report");
const source = report ? new EmbeddedSource(JSON.parse(report.textContent)) : new ServerSource();
new App(source).start();
