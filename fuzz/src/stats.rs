// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM answers that a guest may have taken over: an error is one line without anything of it,
//! and what is taken makes a table, a screen and metrics of printable ASCII, each series once.

use std::collections::BTreeSet;

use vcpufreq::stats::{openmetrics, read_answer, screen, table};

const PID: u32 = 7;

/// An answer.
pub fn stats(data: &[u8]) {
    let stats = match read_answer(data, PID) {
        Ok(stats) => stats,
        Err(error) => {
            let line = error.to_string();
            assert!(is_plain(&line) && !line.contains('\n'), "{line:?}");
            return;
        }
    };
    assert_eq!(stats.pid, PID);
    let screen = screen(&stats, &stats).join("\n");
    let metrics = openmetrics(std::slice::from_ref(&stats));
    for text in [&screen, &metrics, &table(&stats)] {
        assert!(is_plain(text), "{text:?}");
    }
    let lines = metrics.lines().filter(|line| !line.starts_with('#'));
    let mut seen = BTreeSet::new();
    for line in lines {
        let (series, _) = line.rsplit_once(' ').expect("a value");
        assert!(seen.insert(series), "{series} twice");
    }
}

fn is_plain(text: &str) -> bool {
    let plain = |char: char| char == '\n' || (' '..='~').contains(&char);
    text.chars().all(plain)
}
