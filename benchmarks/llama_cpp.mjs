// llama.cpp for benchmarks/llama_cpp.py: reads a line of JSON for each run, and writes one.
//
//     node llama_cpp.mjs NODE_MODULES MODEL THREADS SEQUENCES
//
// In: {"prompts": [[token id, ...], ...], "tokens": 64}. Out: {"seconds": s, "outputs": [[id, ...], ...]}.

import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const [modules, modelPath, threads, sequences] = process.argv.slice(2);
const entry = path.resolve(modules, "node-llama-cpp/dist/index.js");
const {getLlama} = await import(pathToFileURL(entry));
const llama = await getLlama({
    gpu: false, build: "never", maxThreads: Number(threads), logLevel: "error", skipDownload: true,
});
const model = await llama.loadModel({modelPath, gpuLayers: 0});
const context = await model.createContext({
    sequences: Number(sequences), contextSize: 256, batchSize: 2048, threads: Number(threads),
});
const slots = Array.from({length: Number(sequences)}, () => context.getSequence());

async function complete(slot, prompt, count) {
    await slot.clearHistory();
    const output = [];
    for await (const token of slot.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        output.push(token);
        if (output.length === count) break;
    }
    return output;
}

console.log(JSON.stringify({ready: true, systemInfo: llama.systemInfo}));
for await (const line of readline.createInterface({input: process.stdin})) {
    const {prompts, tokens} = JSON.parse(line);
    const started = performance.now();
    const outputs = await Promise.all(
        prompts.map((prompt, index) => complete(slots[index], prompt, tokens)));
    console.log(JSON.stringify({seconds: (performance.now() - started) / 1000, outputs}));
}
process.exit(0);
