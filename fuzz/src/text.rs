// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Texts: a configuration, a profile, a list of CPUs, the kernel's trace.

use vcpufreq::options::file;
use vcpufreq_bench::tracefs::{FrequencyEvent, Mmio, Switch, events};
use vcpufreq_rt::{CpuList, Profile};

/// A configuration file of `run` and `serve`: an error is one line, of a line that is there.
pub fn options(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Err((line, message)) = file::parse(&text) {
        assert!(
            (1..=1 + text.matches('\n').count()).contains(&line),
            "{line}"
        );
        assert!(!message.contains('\n'), "{message:?}");
    }
}

/// A profile of `rt`: an error is one line.
pub fn profile(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Err(error) = Profile::parse("fuzz", &text) {
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

/// A list of CPUs: what is printed of it is the same list.
pub fn cpu_list(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(list) = text.parse::<CpuList>() {
        assert_eq!(list.to_string().parse().as_ref(), Ok(&list), "{text:?}");
    }
}

/// The text of a trace.
pub fn trace(data: &[u8]) {
    for line in events(&String::from_utf8_lossy(data)) {
        let _ = (
            FrequencyEvent::read(&line),
            Switch::read(&line),
            Mmio::read(&line),
        );
    }
}
