// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From an event to its line in the events file.

use serde::Serialize;
use vcpufreq_device::{Clamp, Event, kvm::HostChange};

use super::{Stamped, What};

/// A line of the file. The order of the fields is the order in the line.
#[derive(Serialize)]
pub struct Line {
    /// CLOCK_MONOTONIC.
    t_ns: u64,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpu: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    domain: Option<u32>,
    /// The thread on which it happened.
    tid: i32,
    #[serde(flatten)]
    value: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<String>,
}

/// The value that an event is about.
#[derive(Serialize)]
#[serde(untagged)]
enum Value {
    Khz {
        khz: u32,
    },
    Clamp {
        uclamp_min: u16,
        uclamp_max: u16,
    },
    Access {
        offset: u64,
        len: usize,
        write: bool,
    },
    Count {
        count: u64,
    },
    Policy {
        policy: u32,
    },
    Nothing {},
}

impl From<Clamp> for Value {
    fn from(clamp: Clamp) -> Self {
        Self::Clamp {
            uclamp_min: clamp.min.get(),
            uclamp_max: clamp.max.get(),
        }
    }
}

impl From<&Stamped> for Line {
    fn from(stamped: &Stamped) -> Self {
        let nothing = Value::Nothing {};
        let ok = || Some("ok".to_owned());
        let event = match &stamped.what {
            What::Event(event) => *event,
            What::Host(change) => return Self::of_host(stamped, *change),
        };
        let (event, of, value, result) = match event {
            Event::Request { vcpu, domain, khz } => {
                ("request", (vcpu, domain), Value::Khz { khz: khz.0 }, None)
            }
            Event::Applied {
                vcpu,
                domain,
                clamp,
            } => ("applied", (vcpu, domain), clamp.into(), ok()),
            Event::Unchanged {
                vcpu,
                domain,
                clamp,
            } => ("unchanged", (vcpu, domain), clamp.into(), ok()),
            Event::Superseded { vcpu, domain } => ("superseded", (vcpu, domain), nothing, None),
            Event::Coalesced {
                vcpu,
                domain,
                count,
            } => ("coalesced", (vcpu, domain), Value::Count { count }, None),
            Event::Limited { vcpu, domain } => ("limited", (vcpu, domain), nothing, None),
            Event::Refused {
                vcpu,
                domain,
                clamp,
                error,
            } => (
                "refused",
                (vcpu, domain),
                clamp.into(),
                Some(error.to_string()),
            ),
            Event::NotApplicable {
                vcpu,
                domain,
                reason,
            } => (
                "not_applicable",
                (vcpu, domain),
                nothing,
                Some(reason.to_owned()),
            ),
            other => return Self::without_domain(stamped, &other),
        };
        Self {
            t_ns: stamped.t_ns,
            event,
            vcpu: Some(of.0.0),
            domain: Some(of.1.0),
            tid: stamped.tid,
            value,
            result,
        }
    }
}

impl Line {
    fn of_host(stamped: &Stamped, change: HostChange) -> Self {
        let (event, vcpu, value, kept) = match change {
            HostChange::Governor { policy, schedutil } => {
                ("governor", None, Value::Policy { policy }, schedutil)
            }
            HostChange::Pin { vcpu, pinned } => ("pin", Some(vcpu.0), Value::Nothing {}, pinned),
        };
        Self {
            t_ns: stamped.t_ns,
            event,
            vcpu,
            domain: None,
            tid: stamped.tid,
            value,
            result: Some(if kept { "ok" } else { "lost" }.to_owned()),
        }
    }

    fn without_domain(stamped: &Stamped, event: &Event) -> Self {
        let (event, vcpu, value, result) = match *event {
            Event::IllegalAccess {
                vcpu,
                offset,
                len,
                write,
            } => (
                "illegal_access",
                vcpu,
                Value::Access { offset, len, write },
                None,
            ),
            Event::SourceFailed { vcpu, error } => (
                "source_failed",
                Some(vcpu),
                Value::Nothing {},
                Some(error.to_string()),
            ),
            // An event of a newer device: its debug text is better than none.
            ref other => ("other", None, Value::Nothing {}, Some(format!("{other:?}"))),
        };
        Self {
            t_ns: stamped.t_ns,
            event,
            vcpu: vcpu.map(|vcpu| vcpu.0),
            domain: None,
            tid: stamped.tid,
            value,
            result,
        }
    }
}
