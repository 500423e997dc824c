// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What can be read off a load, by name and unit; how: `measure.rs`.

/// What can be read off a repeat. All times are in µs from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// Until the pCPU of the start runs at its highest frequency.
    ToFmax,
    /// From the mark `end` until it runs at its lowest, to stay there.
    ToFmin,
    /// From the mark `end` until it does so for the first time: a dip, perhaps.
    FirstFmin,
    /// The highest frequency in kHz that it runs at while the load lasts.
    TopKhz,
    /// Until it runs at the frequency that was highest on the host.
    ToHostTop,
    /// Until it runs at the frequency that the host settled at, or above.
    ToNeeded,
    /// Time below that afterwards.
    Below,
    /// Time above the frequency that was highest on the host.
    Above,
    /// Time at its highest frequency.
    AtFmax,
    /// Turns of work that the load's first thread did.
    Work,
    /// Of the time that the load's threads ran, per mille on CPUs of the most
    /// capable cluster; in a guest, of the vCPUs' time.
    OnBig,
    /// Of the time that the load's threads ran, per mille on the CPU that had most of it.
    Busiest,
    /// Until the load is on a CPU of a cluster that isn't the least capable one. Of three
    /// clusters the scheduler goes to either of the larger ones first.
    Migrate,
    /// Until it is on a CPU of the most capable one.
    ToBig,
    /// Until it is there and that cluster runs at its highest frequency.
    ToBigFmax,
    /// Whether it is there at the end: 1 or 0.
    EndsOnBig,
    /// Of rt-app's periods with so many per cent of work, per mille in which
    /// it was done in time.
    Met(u32),
    /// How long that work took, on average.
    Took(u32),
    /// The same at a frequency that is held, where what differs from turn to
    /// turn is what else the machine did: the mean of the middle half.
    Steady(u32),
    /// Jobs, or frames on time, in 1000 s.
    Score,
    /// Energy of all pCPUs from start to end.
    Energy,
    /// Jobs, or frames on time, for 1000 J.
    PerJoule,
    /// How long frames took, of the time that counts (`charged.rs`): so many per cent of those of all
    /// repeats took as long at most.
    FrameTime(u32),
    /// Frames that took longer than their period, in per mille.
    Late,
    /// CPU time of the job as at full speed: its cycles.
    Cycles,
    /// Jobs in 1000 s of the time that counts.
    JobScore,
    /// Of two equal loads, the time of the faster one against the slower one's, in per mille.
    Fairness,
    /// Energy of all pCPUs from start to end, of the time that counts.
    JobEnergy,
    /// From a VMM's start to the guest's first process. Of no load, but of a boot (`boot.rs`).
    FirstProcess,
}

impl Metric {
    /// Whether a workload's is judged by its ratio to the host's: work and what it costs, and of a paced
    /// job how long frames take. A paced one does its work anyway, and a share of late frames has no ratio where the
    /// host has none.
    pub fn is_judged(self) -> bool {
        matches!(self, Self::FrameTime(_) | Self::JobScore | Self::JobEnergy)
    }

    /// Name and unit in reports.
    pub fn name(self) -> (String, &'static str) {
        let (name, unit) = match self {
            Self::ToFmax => ("to_fmax", "us"),
            Self::ToFmin => ("to_fmin", "us"),
            Self::FirstFmin => ("first_fmin", "us"),
            Self::TopKhz => ("top_khz", "kHz"),
            Self::ToHostTop => ("to_host_top", "us"),
            Self::ToNeeded => ("to_needed", "us"),
            Self::Below => ("below", "us"),
            Self::Above => ("above", "us"),
            Self::AtFmax => ("at_fmax", "us"),
            Self::Work => ("work", "turns"),
            Self::OnBig => ("on_big", "permille"),
            Self::Busiest => ("busiest", "permille"),
            Self::Migrate => ("migrate", "us"),
            Self::ToBig => ("to_big", "us"),
            Self::ToBigFmax => ("to_big_fmax", "us"),
            Self::EndsOnBig => ("ends_on_big", "share"),
            Self::Met(duty) => return (format!("duty{duty}.met"), "permille"),
            Self::Took(duty) | Self::Steady(duty) => return (format!("duty{duty}.took"), "us"),
            Self::Score => ("score", "1/ks"),
            Self::Energy => ("energy", "uJ"),
            Self::PerJoule => ("per_joule", "1/kJ"),
            Self::FrameTime(percent) => return (format!("frame_p{percent}"), "us"),
            Self::Late => ("late", "permille"),
            Self::Cycles => ("cycles", "us"),
            Self::JobScore => ("score", "1/ks"),
            Self::Fairness => ("fairness", "permille"),
            Self::JobEnergy => ("energy", "uJ"),
            Self::FirstProcess => ("first_process", "us"),
        };
        (name.to_owned(), unit)
    }
}
