// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One HTTP request for the metrics, as a socket unit with `Accept=yes` hands it over.

use std::io::{self, BufRead};

/// A request's head is at most this long.
const HEAD: u64 = 8 << 10;

/// Reads a request to its empty line, and gives the whole answer to it. `metrics` is called for
/// `GET /metrics` alone.
///
/// # Errors
/// The error of a read of `request`; `InvalidData` for what isn't UTF-8.
pub fn answer(
    request: impl BufRead,
    metrics: impl FnOnce() -> anyhow::Result<String>,
) -> io::Result<String> {
    let mut lines = request.take(HEAD).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let mut ends = false;
    for line in lines {
        ends = line?.is_empty();
        if ends {
            break;
        }
    }
    let words: Vec<_> = first.split(' ').collect();
    Ok(match words[..] {
        ["GET", "/metrics", version] if ends && version.starts_with("HTTP/1.") => match metrics() {
            Ok(text) => response("200 OK", OPENMETRICS, text),
            Err(error) => response("500 Internal Server Error", PLAIN, format!("{error:#}\n")),
        },
        ["GET", _, version] if ends && version.starts_with("HTTP/1.") => {
            response("404 Not Found", PLAIN, "ask for /metrics\n".to_owned())
        }
        _ => response(
            "400 Bad Request",
            PLAIN,
            "this is no GET of HTTP/1\n".to_owned(),
        ),
    })
}

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// In place: a second copy of the largest body would be beyond the service's memory.
fn response(status: &str, content: &str, mut body: String) -> String {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content}\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    body.insert_str(0, &head);
    body
}

#[cfg(test)]
mod tests {
    //! Promises: the metrics are for one request alone; a head that doesn't end is refused.

    use super::*;

    fn asked(request: &str) -> String {
        let answer = answer(request.as_bytes(), || Ok("# EOF\n".to_owned())).unwrap();
        answer.lines().next().unwrap_or_default().to_owned()
    }

    #[test]
    fn metrics_are_for_their_path_alone() {
        let whole = answer(&b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"[..], || {
            Ok("# EOF\n".to_owned())
        });
        let whole = whole.unwrap();
        assert!(whole.starts_with("HTTP/1.1 200 OK\r\n"), "{whole}");
        assert!(whole.ends_with("Content-Length: 6\r\nConnection: close\r\n\r\n# EOF\n"));
        let failed = answer(&b"GET /metrics HTTP/1.1\r\n\r\n"[..], || {
            Err(anyhow::anyhow!("no directory"))
        });
        let failed = failed.unwrap();
        assert!(failed.starts_with("HTTP/1.1 500 Internal Server Error\r\n"));
        assert!(failed.ends_with("\r\n\r\nno directory\n"), "{failed}");
        assert_eq!(asked("GET / HTTP/1.1\r\n\r\n"), "HTTP/1.1 404 Not Found");
        for bad in [
            "",
            "GET /metrics",
            "GET /metrics HTTP/1.1\r\nHost: x\r\n",
            "POST /metrics HTTP/1.1\r\n\r\n",
            "GET /metrics HTTP/2\r\n\r\n",
        ] {
            assert_eq!(asked(bad), "HTTP/1.1 400 Bad Request", "{bad}");
        }
        let long = format!("GET /metrics HTTP/1.1\r\n{}\r\n\r\n", "x".repeat(8 << 10));
        assert_eq!(asked(&long), "HTTP/1.1 400 Bad Request");
    }
}
