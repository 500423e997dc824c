// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Texts: a configuration, a profile, a list of CPUs, the kernel's trace, a request for the metrics;
//! and the events of the BPF programs.

use vcpufreq::options::file;
use vcpufreq_bench::tracefs::{FrequencyEvent, Mmio, Switch, events};
use vcpufreq_host_bpf::BpfEvent;
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

/// A request for the metrics: they are for a `GET` alone, and the answer has the length that it names.
pub fn metrics(data: &[u8]) {
    let mut asked = false;
    let metrics = || {
        asked = true;
        Ok("# EOF\n".to_owned())
    };
    let Ok(answer) = vcpufreq::stats::answer(data, metrics) else {
        return;
    };
    assert_eq!(asked, answer.starts_with("HTTP/1.1 200 "));
    assert!(!asked || data.starts_with(b"GET /metrics HTTP/1."));
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("Content-Length: "));
    assert_eq!(
        length.and_then(|length| length.parse().ok()),
        Some(body.len())
    );
}

/// An event of the BPF programs: it is of the size that they write, and its clamp is one.
pub fn bpf_event(data: &[u8]) {
    const SIZE: usize = 40;
    let event = vcpufreq_host_bpf::parse(data);
    assert!(event.is_none() || data.len() == SIZE, "{event:?}");
    if let Some(BpfEvent::Handled(request)) = event {
        let bits = request.clamp.bits().to_ne_bytes();
        assert_eq!(bits, data[24..28], "{request:?}");
        assert!(request.clamp.min.get() <= 1024 && request.clamp.max.get() <= 1024);
    }
}
