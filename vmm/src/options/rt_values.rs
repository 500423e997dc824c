// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of real-time vCPUs: scheduling, page sizes, latency bounds. From text to checked types.

use std::{fmt, str::FromStr};

use vcpufreq_host::SchedAttr;

use vcpufreq_vm::memory::PageSize;

/// How the host schedules a real-time vCPU's thread, see sched(7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RtPolicy {
    /// SCHED_FIFO with a priority of 1 to 99.
    Fifo(u32),
    /// SCHED_RR with a priority of 1 to 99.
    Rr(u32),
    /// SCHED_DEADLINE: runtime in each period, in µs; the deadline is the period.
    Deadline {
        /// At least 2, at most the period.
        runtime_us: u32,
        /// At most 4 s, the kernel's limit.
        period_us: u32,
    },
}

impl RtPolicy {
    /// The scheduling attributes of such a thread. What it forks starts without.
    #[must_use]
    pub fn attr(self) -> SchedAttr {
        let ns = |us: u32| u64::from(us) * 1000;
        let fixed = |policy, priority| SchedAttr {
            policy,
            priority,
            ..SchedAttr::default()
        };
        let attr = match self {
            Self::Fifo(priority) => fixed(SchedAttr::FIFO, priority),
            Self::Rr(priority) => fixed(SchedAttr::RR, priority),
            Self::Deadline {
                runtime_us,
                period_us,
            } => SchedAttr::deadline(ns(runtime_us), ns(period_us)),
        };
        SchedAttr {
            flags: SchedAttr::RESET_ON_FORK,
            ..attr
        }
    }
}

/// `kernel.sched_deadline_period_max_us` as the kernel has it.
const PERIOD_MAX_US: u32 = 1 << 22;
/// The kernel counts bandwidth in units of 1024 ns.
const RUNTIME_MIN_US: u32 = 2;

impl FromStr for RtPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "'{text}' is no real-time policy; write fifo:1 to fifo:99, rr:1 to rr:99, or deadline:RUNTIME/PERIOD in µs"
            )
        };
        let (policy, rest) = text.split_once(':').ok_or_else(wrong)?;
        let number = |text: &str| text.parse::<u32>().map_err(|_| wrong());
        match policy {
            "fifo" | "rr" => match number(rest)? {
                priority @ 1..=99 if policy == "fifo" => Ok(Self::Fifo(priority)),
                priority @ 1..=99 => Ok(Self::Rr(priority)),
                _ => Err(wrong()),
            },
            "deadline" => {
                let (runtime, period) = rest.split_once('/').ok_or_else(wrong)?;
                let (runtime_us, period_us) = (number(runtime)?, number(period)?);
                let fits = runtime_us >= RUNTIME_MIN_US
                    && runtime_us <= period_us
                    && period_us <= PERIOD_MAX_US;
                fits.then_some(Self::Deadline {
                    runtime_us,
                    period_us,
                })
                .ok_or_else(wrong)
            }
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for RtPolicy {
    /// As `--rt` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fifo(priority) => write!(f, "fifo:{priority}"),
            Self::Rr(priority) => write!(f, "rr:{priority}"),
            Self::Deadline {
                runtime_us,
                period_us,
            } => write!(f, "deadline:{runtime_us}/{period_us}"),
        }
    }
}

/// Reads the size of huge pages.
///
/// # Errors
/// What is to be written instead.
pub fn page_size(text: &str) -> Result<PageSize, String> {
    match text {
        "2M" => Ok(PageSize::Mib2),
        "1G" => Ok(PageSize::Gib1),
        _ => Err(format!("'{text}' is no size of huge pages; write 2M or 1G")),
    }
}

/// How long a pCPU may take to wake up: µs, or `n/a` for not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeLatency {
    /// It polls.
    None,
    /// At most so many µs, 1 or more: the kernel takes 0 for no limit.
    Us(u32),
}

impl FromStr for ResumeLatency {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<i32>() {
            _ if text == "n/a" => Ok(Self::None),
            Ok(us @ 1..) => Ok(Self::Us(us.unsigned_abs())),
            _ => Err(format!("'{text}' is no latency; write µs, or n/a for none")),
        }
    }
}

impl fmt::Display for ResumeLatency {
    /// As `pm_qos_resume_latency_us` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("n/a"),
            Self::Us(us) => us.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Each syntax gives its value, and nothing else is taken.
    use super::*;

    #[test]
    fn policies() {
        let deadline = RtPolicy::Deadline {
            runtime_us: 500,
            period_us: 1000,
        };
        for (text, policy) in [
            ("fifo:1", RtPolicy::Fifo(1)),
            ("rr:99", RtPolicy::Rr(99)),
            ("deadline:500/1000", deadline),
        ] {
            assert_eq!(text.parse(), Ok(policy));
            assert_eq!(policy.to_string(), text);
        }
        for text in [
            "fifo",
            "fifo:0",
            "rr:100",
            "other:0",
            "deadline:5",
            "deadline:1/9",
            "deadline:9/8",
            "deadline:9/5000000",
        ] {
            assert!(text.parse::<RtPolicy>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_and_latencies() {
        assert_eq!(page_size("1G"), Ok(PageSize::Gib1));
        assert!(page_size("4K").is_err());
        assert_eq!("50".parse(), Ok(ResumeLatency::Us(50)));
        assert_eq!("n/a".parse(), Ok(ResumeLatency::None));
        for text in ["0", "-1", "soon"] {
            assert!(text.parse::<ResumeLatency>().is_err(), "{text}");
        }
    }
}
