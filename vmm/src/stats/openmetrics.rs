// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stats as OpenMetrics text 1.0, for Prometheus and what reads its format.
//!
//! Histograms have no `_sum`: the VMM counts times by powers of two and keeps no total.

use std::fmt::Write as _;

use vcpufreq_device::HISTOGRAM_BUCKETS;

use super::{OppTime, Stats, Times, VcpuStats};

/// Labels behind `pid` and `vcpu`, and a value; none if it is unknown.
type Samples = Vec<(String, Option<u64>)>;

/// What is measured of each vCPU: name, type, unit, help, and its samples.
struct Family {
    name: &'static str,
    kind: Kind,
    help: &'static str,
    of: fn(&VcpuStats) -> Samples,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    /// A gauge in Hz.
    Hertz,
}

impl Kind {
    /// The end of a sample's name.
    fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge | Self::Hertz => "",
        }
    }
}

const FAMILIES: [Family; 15] = [
    Family {
        name: "vcpufreq_vcpu",
        kind: Kind::Gauge,
        help: "1 for each vCPU, with its performance domain and the path in use",
        of: |of| {
            let labels = format!(",domain=\"{}\",path=\"{}\"", of.domain, of.path);
            vec![(labels, Some(1))]
        },
    },
    Family {
        name: "vcpufreq_requests",
        kind: Kind::Counter,
        help: "Requests of the guest",
        of: |of| one(of.counts.requests),
    },
    Family {
        name: "vcpufreq_request_outcomes",
        kind: Kind::Counter,
        help: "Requests by outcome",
        of: |of| {
            let counts = &of.counts;
            let outcomes = [
                ("applied", counts.applied),
                ("unchanged", counts.unchanged),
                ("superseded", counts.superseded),
                ("coalesced", counts.coalesced),
                ("refused", counts.refused),
                ("not_applicable", counts.not_applicable),
            ];
            labelled("outcome", &outcomes)
        },
    },
    Family {
        name: "vcpufreq_requests_limited",
        kind: Kind::Counter,
        help: "Requests that the rate limit made wait",
        of: |of| one(of.counts.limited),
    },
    Family {
        name: "vcpufreq_illegal_accesses",
        kind: Kind::Counter,
        help: "Accesses outside the contract",
        of: |of| one(of.counts.illegal),
    },
    Family {
        name: "vcpufreq_unreadable_frequencies",
        kind: Kind::Counter,
        help: "Reads of cur_perf for which the host had no answer",
        of: |of| one(of.counts.source_failures),
    },
    Family {
        name: "vcpufreq_accesses",
        kind: Kind::Counter,
        help: "Accesses that exited to the VMM, and requests that ended in the kernel",
        of: |of| {
            let accesses = &of.accesses;
            let ways = [
                ("read_exited", accesses.reads_exited),
                ("write_exited", accesses.writes_exited),
                ("write_in_kernel", accesses.writes_in_kernel),
            ];
            labelled("access", &ways)
        },
    },
    Family {
        name: "vcpufreq_requested_hertz",
        kind: Kind::Hertz,
        help: "The newest request of the vCPU's domain",
        of: |of| vec![(String::new(), of.asks_khz.map(hz))],
    },
    Family {
        name: "vcpufreq_cur_perf_hertz",
        kind: Kind::Hertz,
        help: "The last cur_perf that the vCPU read",
        of: |of| one(hz(of.gets_khz)),
    },
    Family {
        name: "vcpufreq_pcpu_hertz",
        kind: Kind::Hertz,
        help: "Frequency of the pCPU that the vCPU's thread is on",
        of: |of| vec![(String::new(), of.pcpu_khz.map(hz))],
    },
    Family {
        name: "vcpufreq_pcpu",
        kind: Kind::Gauge,
        help: "Number of the pCPU that the vCPU's thread is on",
        of: |of| vec![(String::new(), of.pcpu.map(u64::from))],
    },
    Family {
        name: "vcpufreq_uclamp",
        kind: Kind::Gauge,
        help: "The clamp of the domain's request, 0 to 1024",
        of: |of| {
            let bounds = [
                ("min", u64::from(of.uclamp.0)),
                ("max", u64::from(of.uclamp.1)),
            ];
            labelled("bound", &bounds)
        },
    },
    Family {
        name: "vcpufreq_utilization",
        kind: Kind::Gauge,
        help: "Utilization of the vCPU's thread, and 1.25 times that of what else runs on its pCPU",
        of: |of| {
            let known = [("own", of.own_util), ("others", of.others_util)];
            let known = known.map(|(whose, util)| (label("whose", whose), util.map(u64::from)));
            known.into()
        },
    },
    Family {
        name: "vcpufreq_scx_target",
        kind: Kind::Gauge,
        help: "What the kernel was given for the vCPU's pCPU by scx, 0 to 1024",
        of: |of| vec![(String::new(), of.target.map(u64::from))],
    },
    Family {
        // Not "_sum", which is the suffix of a histogram's sample.
        name: "vcpufreq_scx_demand",
        kind: Kind::Gauge,
        help: "What all runnable vCPUs on the vCPU's pCPU need by scx; its target is at most 1024 of this",
        of: |of| vec![(String::new(), of.target_sum.map(u64::from))],
    },
];

/// What is measured of a VM: name, type, help, value.
type OfVm = (&'static str, Kind, &'static str, fn(&Stats) -> u64);

const OF_VM: [OfVm; 4] = [
    (
        "vcpufreq_accesses_outside",
        Kind::Counter,
        "Accesses behind the last vCPU's page",
        |of| of.accesses_outside,
    ),
    (
        "vcpufreq_governors_lost",
        Kind::Counter,
        "Policies found under another governor than schedutil",
        |of| of.governors_lost,
    ),
    (
        "vcpufreq_governors_off",
        Kind::Gauge,
        "Policies that are under another governor than schedutil now",
        |of| of.governors_off,
    ),
    (
        "vcpufreq_pins_lost",
        Kind::Counter,
        "vCPUs found off the pCPUs that they are pinned to",
        |of| of.pins_lost,
    ),
];

/// A histogram: name, help, times.
type OfTimes = (&'static str, &'static str, fn(&VcpuStats) -> &Times);

const OF_TIMES: [OfTimes; 2] = [
    (
        "vcpufreq_clamp_seconds",
        "From a request that changed the clamp until it was in force",
        |of| &of.clamp_after,
    ),
    (
        "vcpufreq_frequency_seconds",
        "From a request that changed the clamp until the frequency was another one",
        |of| &of.freq_after,
    ),
];

/// Times at OPPs, which are counters: of requests, and of the host's policies.
const REQUESTED: [&str; 2] = [
    "vcpufreq_requested_seconds",
    "Time for which a request of the vCPU's domain was in force, at 0 Hz for which none was",
];
const PCPU: [&str; 2] = [
    "vcpufreq_pcpu_seconds",
    "Time for which the pCPUs of a policy ran at a frequency, since the VM's start",
];

/// All virtual machines' metrics, each family once, and the end mark.
#[must_use]
pub fn openmetrics(vms: &[Stats]) -> String {
    let mut text = String::new();
    for family in FAMILIES {
        let total = family.kind.suffix();
        head(&mut text, family.name, family.kind, family.help);
        for (labels, vcpu) in each_vcpu(vms) {
            let known = (family.of)(vcpu).into_iter();
            for (more, value) in known.filter_map(|(more, value)| Some((more, value?))) {
                line(
                    &mut text,
                    (family.name, total),
                    &(labels.clone() + &more),
                    value,
                );
            }
        }
    }
    for (name, kind, help, of) in OF_VM {
        head(&mut text, name, kind, help);
        for vm in vms {
            let labels = format!("pid=\"{}\"", vm.pid);
            line(&mut text, (name, kind.suffix()), &labels, of(vm));
        }
    }
    for (name, help, of) in OF_TIMES {
        text += &format!("# TYPE {name} histogram\n# UNIT {name} seconds\n# HELP {name} {help}\n");
        for (labels, vcpu) in each_vcpu(vms) {
            buckets(&mut text, name, &labels, of(vcpu));
        }
    }
    tunings(&mut text, vms);
    caps(&mut text, vms);
    residency(&mut text, vms);
    text + "# EOF\n"
}

/// What programs have set by `vcpufreq tune`.
const TUNED: &str = "vcpufreq_tuned_hertz";

fn tunings(text: &mut String, vms: &[Stats]) {
    let help = "Floors and ceilings that programs have set, by handle";
    head(text, TUNED, Kind::Hertz, help);
    for vm in vms {
        for tuning in &vm.tunings {
            let bounds = [("floor", tuning.floor_khz), ("ceiling", tuning.ceiling_khz)];
            for (bound, khz) in bounds {
                let labels = format!(
                    "pid=\"{}\",vcpu=\"{}\",handle=\"{}\",bound=\"{bound}\",user=\"{}\",client=\"{}\"",
                    vm.pid, tuning.vcpu, tuning.handle, tuning.user, tuning.client,
                );
                khz.into_iter()
                    .for_each(|khz| line(text, (TUNED, ""), &labels, hz(khz)));
            }
        }
    }
}

/// Lowered maxima of policies.
const CAPPED: &str = "vcpufreq_capped_hertz";

fn caps(text: &mut String, vms: &[Stats]) {
    let help = "The highest frequency that a policy may have now, if that is below its pCPUs' own";
    head(text, CAPPED, Kind::Hertz, help);
    for vm in vms {
        for policy in &vm.policies {
            let labels = format!("pid=\"{}\",policy=\"{}\"", vm.pid, policy.policy);
            let khz = policy.capped_khz.into_iter();
            khz.for_each(|khz| line(text, (CAPPED, ""), &labels, hz(khz)));
        }
    }
}

fn residency(text: &mut String, vms: &[Stats]) {
    let head = |[name, help]: [&str; 2]| {
        format!("# TYPE {name} counter\n# UNIT {name} seconds\n# HELP {name} {help}\n")
    };
    *text += &head(REQUESTED);
    for (labels, vcpu) in each_vcpu(vms) {
        opps(text, REQUESTED[0], &labels, &vcpu.requested);
    }
    *text += &head(PCPU);
    for vm in vms {
        for policy in &vm.policies {
            let labels = format!("pid=\"{}\",policy=\"{}\"", vm.pid, policy.policy);
            opps(text, PCPU[0], &labels, &policy.opps);
        }
    }
}

fn opps(text: &mut String, name: &str, labels: &str, times: &[OppTime]) {
    for OppTime { khz, us } in times {
        let (s, us) = (us / 1_000_000, us % 1_000_000);
        let hz = hz(*khz);
        // Writing to a string doesn't fail.
        let _ = writeln!(text, "{name}_total{{{labels},hertz=\"{hz}\"}} {s}.{us:06}");
    }
}

fn each_vcpu(vms: &[Stats]) -> impl Iterator<Item = (String, &VcpuStats)> {
    vms.iter().flat_map(|vm| {
        let labels = |vcpu: &VcpuStats| format!("pid=\"{}\",vcpu=\"{}\"", vm.pid, vcpu.vcpu);
        vm.vcpus.iter().map(move |vcpu| (labels(vcpu), vcpu))
    })
}

fn head(text: &mut String, name: &str, kind: Kind, help: &str) {
    let (kind, unit) = match kind {
        Kind::Counter => ("counter", String::new()),
        Kind::Gauge => ("gauge", String::new()),
        Kind::Hertz => ("gauge", format!("# UNIT {name} hertz\n")),
    };
    *text += &format!("# TYPE {name} {kind}\n{unit}# HELP {name} {help}\n");
}

fn line(text: &mut String, (name, suffix): (&str, &str), labels: &str, value: u64) {
    // Writing to a string doesn't fail.
    let _ = writeln!(text, "{name}{suffix}{{{labels}}} {value}");
}

/// Bucket *n* of [`Times`] has times below 2^n ns, the last one all others. All are there, the empty
/// ones too: Prometheus sees no growth in the first sample of a series.
fn buckets(text: &mut String, name: &str, labels: &str, times: &Times) {
    let mut sum = 0_u64;
    for bucket in 0..HISTOGRAM_BUCKETS - 1 {
        let count = times.buckets.get(bucket);
        sum = sum.saturating_add(count.copied().unwrap_or_default());
        let below_ns = 1_u64 << bucket;
        let le = format!(
            "{}.{:09}",
            below_ns / 1_000_000_000,
            below_ns % 1_000_000_000
        );
        line(
            text,
            (name, "_bucket"),
            &format!("{labels},le=\"{le}\""),
            sum,
        );
    }
    line(
        text,
        (name, "_bucket"),
        &format!("{labels},le=\"+Inf\""),
        // It can't be below the others.
        times.n.max(sum),
    );
}

fn one(value: u64) -> Samples {
    vec![(String::new(), Some(value))]
}

fn labelled(name: &str, values: &[(&str, u64)]) -> Samples {
    let sample = |(of, value): &(&str, u64)| (label(name, of), Some(*value));
    values.iter().map(sample).collect()
}

fn label(name: &str, of: &str) -> String {
    format!(",{name}=\"{of}\"")
}

fn hz(khz: u32) -> u64 {
    u64::from(khz) * 1000
}

#[cfg(test)]
#[path = "openmetrics_tests.rs"]
pub(super) mod tests;
