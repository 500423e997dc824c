// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From an event to its line in the events file.

use serde::Serialize;
use vcpufreq_bridge::HostEvent;
use vcpufreq_bridge::{TuneEnd, Tuning};
use vcpufreq_device::{Clamp, DomainId, Event, VcpuId};

/// An event with when and where it happened.
#[derive(Clone, Copy, Debug)]
pub struct Stamped {
    pub t_ns: u64,
    pub tid: i32,
    pub what: What,
}

/// What happened.
#[derive(Clone, Copy, Debug)]
pub enum What {
    /// Of a guest's access.
    Event(Event),
    /// Not caused by a guest's access.
    Host(HostEvent),
}

/// A line of the file. The order of the fields is the order in the line.
#[derive(Serialize)]
pub struct EventLine {
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
    value: FieldValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<String>,
}

/// The value that an event is about.
#[derive(Serialize)]
#[serde(untagged)]
enum FieldValue {
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
    /// As in the stats.
    Load {
        #[serde(skip_serializing_if = "Option::is_none")]
        pcpu: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        pcpu_khz: Option<u32>,
        uclamp_min: u16,
        uclamp_max: u16,
        #[serde(skip_serializing_if = "Option::is_none")]
        own_util: Option<u16>,
        #[serde(skip_serializing_if = "Option::is_none")]
        others_util: Option<u16>,
        #[serde(skip_serializing_if = "Option::is_none")]
        target_sum: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        target: Option<u16>,
    },
    Tuning {
        handle: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        floor_khz: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        ceiling_khz: Option<u32>,
        until_ns: u64,
        user: u32,
        client: u32,
    },
    Nothing {},
}

impl From<Tuning> for FieldValue {
    fn from(tuning: Tuning) -> Self {
        Self::Tuning {
            handle: tuning.handle,
            floor_khz: tuning.request.floor.map(|khz| khz.0),
            ceiling_khz: tuning.request.ceiling.map(|khz| khz.0),
            until_ns: tuning.until_ns,
            user: tuning.client.user,
            client: tuning.client.pid,
        }
    }
}

impl From<Clamp> for FieldValue {
    fn from(clamp: Clamp) -> Self {
        Self::Clamp {
            uclamp_min: clamp.min.get(),
            uclamp_max: clamp.max.get(),
        }
    }
}

/// What happened, to which vCPU and domain, its value and its result.
type Parts = (
    &'static str,
    (Option<VcpuId>, Option<DomainId>),
    FieldValue,
    Option<String>,
);

impl From<&Stamped> for EventLine {
    fn from(stamped: &Stamped) -> Self {
        let (event, (vcpu, domain), value, result) = match stamped.what {
            What::Event(event) => of_event(&event),
            What::Host(change) => of_host(change),
        };
        Self {
            t_ns: stamped.t_ns,
            event,
            vcpu: vcpu.map(|vcpu| vcpu.0),
            domain: domain.map(|domain| domain.0),
            tid: stamped.tid,
            value,
            result,
        }
    }
}

fn of_event(event: &Event) -> Parts {
    let of = |vcpu, domain| (Some(vcpu), Some(domain));
    let nothing = FieldValue::Nothing {};
    let ok = || Some("ok".to_owned());
    match *event {
        Event::Request { vcpu, domain, khz } => (
            "request",
            of(vcpu, domain),
            FieldValue::Khz { khz: khz.0 },
            None,
        ),
        Event::Applied {
            vcpu,
            domain,
            clamp,
        } => ("applied", of(vcpu, domain), clamp.into(), ok()),
        Event::Unchanged {
            vcpu,
            domain,
            clamp,
        } => ("unchanged", of(vcpu, domain), clamp.into(), ok()),
        Event::Superseded { vcpu, domain } => ("superseded", of(vcpu, domain), nothing, None),
        Event::Coalesced {
            vcpu,
            domain,
            count,
        } => (
            "coalesced",
            of(vcpu, domain),
            FieldValue::Count { count },
            None,
        ),
        Event::Limited { vcpu, domain } => ("limited", of(vcpu, domain), nothing, None),
        Event::Refused {
            vcpu,
            domain,
            clamp,
            error,
        } => {
            let result = Some(error.to_string());
            ("refused", of(vcpu, domain), clamp.into(), result)
        }
        Event::NotApplicable {
            vcpu,
            domain,
            reason,
        } => {
            let result = Some(reason.to_owned());
            ("not_applicable", of(vcpu, domain), nothing, result)
        }
        Event::IllegalAccess {
            vcpu,
            offset,
            len,
            write,
        } => {
            let value = FieldValue::Access { offset, len, write };
            ("illegal_access", (vcpu, None), value, None)
        }
        Event::SourceFailed { vcpu, error } => {
            let result = Some(error.to_string());
            ("source_failed", (Some(vcpu), None), nothing, result)
        }
        // An event of a newer device: its debug text is better than none.
        ref other => {
            let result = Some(format!("{other:?}"));
            ("other", (None, None), nothing, result)
        }
    }
}

fn of_host(change: HostEvent) -> Parts {
    let kept = |kept| Some(if kept { "ok" } else { "lost" }.to_owned());
    let ended_by = |how| match how {
        TuneEnd::Time => "time",
        TuneEnd::Untuned => "untune",
        TuneEnd::Client => "client",
    };
    let (event, vcpu, value, result) = match change {
        HostEvent::Tuned(tuning) => ("tuned", Some(tuning.request.vcpu), tuning.into(), None),
        HostEvent::Untuned(tuning, how) => {
            let how = Some(ended_by(how).to_owned());
            ("untuned", Some(tuning.request.vcpu), tuning.into(), how)
        }
        HostEvent::Governor { policy, schedutil } => {
            let value = FieldValue::Policy { policy };
            ("governor", None, value, kept(schedutil))
        }
        HostEvent::Pin { vcpu, pinned } => {
            let nothing = FieldValue::Nothing {};
            ("pin", Some(vcpu), nothing, kept(pinned))
        }
        HostEvent::Load {
            vcpu,
            pcpu,
            clamp,
            load,
            target,
        } => {
            let value = FieldValue::Load {
                pcpu: pcpu.map(|(pcpu, _)| pcpu),
                pcpu_khz: pcpu.map(|(_, khz)| khz.0),
                uclamp_min: clamp.min.get(),
                uclamp_max: clamp.max.get(),
                own_util: load.map(|load| load.own.get()),
                others_util: load.map(|load| load.others.get()),
                target_sum: target.map(|of| of.sum),
                target: target.map(|of| of.target.get()),
            };
            ("load", Some(vcpu), value, None)
        }
    };
    (event, (vcpu, None), value, result)
}
