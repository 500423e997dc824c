// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: the command of `vcpufreq-metrics@.service`, with a connection as standard input and
//! output, answers a scrape with OpenMetrics, and another request with its HTTP error.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use tempfile::TempDir;

const UNIT: &str = include_str!("../docs/examples/vcpufreq-metrics@.service");

/// What the unit's command answers: head and body.
fn asked(request: &str) -> (String, String) {
    let directory = TempDir::new().expect("a temporary directory");
    let command = UNIT
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart=/usr/bin/vcpufreq "))
        .expect("the unit starts the program");
    let (mut client, connection) = UnixStream::pair().expect("a pair of sockets");
    let output = connection.try_clone().expect("a second descriptor");
    client
        .write_all(request.as_bytes())
        .expect("room for a request");
    // The client keeps its end open, as a scraper does: the request ends with its empty line.
    let status = Command::new(env!("CARGO_BIN_EXE_vcpufreq"))
        .args(command.split(' '))
        .env("XDG_RUNTIME_DIR", directory.path())
        .stdin(Stdio::from(OwnedFd::from(connection)))
        .stdout(Stdio::from(OwnedFd::from(output)))
        .status()
        .expect("the program runs");
    assert!(status.success(), "{status}");
    let mut answer = String::new();
    client
        .read_to_string(&mut answer)
        .expect("the connection ends with the program");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    (head.to_owned(), body.to_owned())
}

#[test]
fn a_scrape_gets_the_metrics() {
    assert!(UNIT.contains("StandardInput=socket\nStandardOutput=socket\n"));
    let (head, body) = asked("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9598\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    let length = format!("\r\nContent-Length: {}\r\n", body.len());
    assert!(head.contains(&length), "{head}");
    assert!(body.starts_with("# TYPE vcpufreq_"), "{body}");
    assert!(body.ends_with("\n# EOF\n"), "{body}");
}

#[test]
fn another_request_gets_none() {
    let (head, body) = asked("GET / HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 404 "), "{head}");
    assert!(!body.contains("vcpufreq_"), "{body}");
}
