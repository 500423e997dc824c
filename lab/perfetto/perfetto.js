// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Asks Perfetto's trace processor, as its page ships it, about a trace: node perfetto.js FOLDER TRACE SQL...
// Each SQL selects one text, which is printed; or one line tells why there is none.
"use strict";
const fs = require("fs");
const path = require("path");
const v8 = require("v8");
const vm = require("vm");

// What runs once is compiled once, which an emulated CPU takes a sixth of the time for.
v8.setFlagsFromString("--liftoff-only");

// Methods and fields of Perfetto's trace_processor.proto.
const APPEND = 1, END = 2, QUERY = 3;
const FIELD = { message: 1, request: 2, fatal: 5, trace: 101, query: 103, appended: 201, answer: 203 };
const APPENDED = { why: 2 };
const ANSWER = { why: 2, batch: 3 };
const BATCH = { texts: 5 };
const SQL = 1;
/* More than this the page doesn't pass on at once. */
const PART = 16 << 20;
const [folder, file, ...queries] = process.argv.slice(2);

function varint(value) {
	const bytes = [];
	for (; value > 127; value = Math.floor(value / 128))
		bytes.push(value % 128 + 128);
	return Buffer.from([...bytes, value]);
}

const number = (field, value) => Buffer.concat([varint(field * 8), varint(value)]);
const bytes = (field, value) => Buffer.concat([varint(field * 8 + 2), varint(value.length), value]);

// The first field of this number in a message: its bytes, or an empty buffer.
function field(message, wanted) {
	let at = 0;
	const next = () => {
		let value = 0, unit = 1, byte;
		do {
			byte = message[at++];
			value += (byte & 127) * unit;
			unit *= 128;
		} while (byte > 127);
		return value;
	};
	while (at < message.length) {
		const tag = next();
		const start = at;
		const length = { 0: () => (next(), 0), 1: () => 8, 2: next, 5: () => 4 }[tag & 7]();
		const value = (tag & 7) === 0 ? message.subarray(start, at) : message.subarray(at, at + length);
		at += length;
		if (tag >> 3 === wanted)
			return value;
	}
	return Buffer.alloc(0);
}

// The page's worker, for which this is a browser.
const page = {
	console: { error() {}, log() {}, warn() {} }, performance, setTimeout, TextDecoder, URL,
	location: { href: "http://localhost/" },
	WorkerGlobalScope: class {},
	XMLHttpRequest: class {
		open(_, name) { this.name = name; }
		send() { this.response = fs.readFileSync(path.join(folder, path.basename(this.name))); }
	},
};
page.self = page;
vm.createContext(page);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), page);

const answers = [];
const port = { postMessage: (message) => answers.push(Buffer.from(message)) };

// The answer to a request; it comes at once.
function ask(method, args = Buffer.alloc(0)) {
	const request = bytes(FIELD.message, Buffer.concat([number(FIELD.request, method), args]));
	port.onmessage({ data: vm.runInContext("Uint8Array", page).from(request) });
	const answer = field(answers.pop(), FIELD.message);
	const fatal = field(answer, FIELD.fatal);
	if (fatal.length)
		throw new Error(fatal);
	return answer;
}

function text(sql) {
	const answer = field(ask(QUERY, bytes(FIELD.query, bytes(SQL, Buffer.from(sql)))), FIELD.answer);
	const why = field(answer, ANSWER.why);
	if (why.length)
		throw new Error(why);
	return field(field(answer, ANSWER.batch), BATCH.texts).toString().replace(/\0$/, "");
}

// Once the worker is ready.
setImmediate(() => {
	page.onmessage({ data: port });
	const trace = fs.readFileSync(file);
	for (let at = 0; at < trace.length; at += PART) {
		const part = bytes(FIELD.trace, trace.subarray(at, at + PART));
		const why = field(field(ask(APPEND, part), FIELD.appended), APPENDED.why);
		if (why.length)
			throw new Error(why);
	}
	ask(END);
	queries.forEach((sql) => console.log(text(sql)));
});
