// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Time that counts on a host whose CPUs take turns. All CPUs of the lab's emulated host share one
//! stream of instructions: a CPU that waits for its turn looks busy, and does nothing. Of that time
//! the part counts in which the CPU would have been busy with a stream of its own.
//!
//! With the speed model a CPU works for a share of its busy time, and spins the rest away, in which
//! the others have the stream. While *k* CPUs work, each goes on at 1/*k*. So what counts of a busy
//! CPU's time is the mean of 1/(1 + how many others work), each of which works by chance for its
//! share. On hardware all of it counts.

use crate::machine::{BenchMachine, Cluster};
use crate::observed::Observed;

/// The whole, of shares and of what counts.
const WHOLE: u64 = 1_000_000;

/// What counted between two moments.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ChargedTime {
    /// Moments in µs, and the time that had counted by then, in ns.
    passed: Vec<(u64, u64)>,
    /// Of all CPUs outside of their idle tasks, in ns.
    pub busy_ns: u64,
    /// The same at full speed: the cycles that it had, in ns of the fastest CPU.
    pub full_ns: u64,
    /// Energy of that time in pJ; `None` where a frequency's power isn't known.
    pub pj: Option<u64>,
}

impl ChargedTime {
    /// The time that counts between two moments in µs, in ns.
    pub fn between(&self, from: u64, to: u64) -> u64 {
        self.by(to).saturating_sub(self.by(from))
    }

    fn by(&self, us: u64) -> u64 {
        let next = self.passed.partition_point(|(at, _)| *at <= us);
        let before = next.checked_sub(1).and_then(|at| self.passed.get(at));
        match (before, self.passed.get(next)) {
            // Within a span time passes evenly.
            (Some((at, ns)), Some((end, more))) => ns + (more - ns) * (us - at) / (end - at).max(1),
            (Some((at, ns)), None) => ns + (us - at) * 1000,
            _ => 0,
        }
    }
}

/// What can change at a moment.
#[derive(Debug, Clone, Copy)]
enum TraceStep {
    /// This CPU, by its place among all, runs something or idles.
    Busy(usize, bool),
    /// This cluster runs at so many kHz.
    Khz(usize, u32),
}

impl Observed {
    /// What counts between two moments in µs.
    pub fn charged(&self, machine: &BenchMachine, (from, to): (u64, u64)) -> ChargedTime {
        let mut hosts = CpuStates::at(self, machine, from);
        let mut charged = ChargedTime {
            passed: vec![(from, 0)],
            pj: Some(0),
            ..ChargedTime::default()
        };
        let mut since = from;
        for (us, step) in self.steps(machine, (from, to)) {
            hosts.charge(&mut charged, (since, us));
            since = us;
            match step {
                TraceStep::Busy(cpu, busy) => hosts.cpus[cpu].busy = busy,
                TraceStep::Khz(cluster, khz) => hosts.khz[cluster] = khz,
            }
        }
        hosts.charge(&mut charged, (since, to));
        charged
    }

    fn steps(&self, machine: &BenchMachine, (from, to): (u64, u64)) -> Vec<(u64, TraceStep)> {
        let cpus = machine.cpus();
        let within = |us: u64| us > from && us < to;
        let switches = self.seen.switches.iter().filter_map(|one| {
            let cpu = cpus.iter().position(|cpu| *cpu == one.cpu)?;
            Some((one.time_us, TraceStep::Busy(cpu, one.next.1 != 0)))
        });
        let changes = self.seen.changes.iter().filter_map(|one| {
            let own = |cluster: &Cluster| cluster.first() == one.cpu;
            let cluster = machine.clusters.iter().position(own)?;
            Some((one.time_us, TraceStep::Khz(cluster, one.khz)))
        });
        let mut steps: Vec<_> = switches.chain(changes).collect();
        steps.retain(|(us, _)| within(*us));
        steps.sort_by_key(|(us, _)| *us);
        steps
    }

    /// Whether a CPU runs something at a moment.
    fn busy_at(&self, cpu: u32, us: u64) -> bool {
        let own = || self.seen.switches.iter().filter(|one| one.cpu == cpu);
        let last = own().take_while(|one| one.time_us <= us).last();
        match (last, own().next()) {
            (Some(last), _) => last.next.1 != 0,
            (None, Some(first)) => first.prev.1 != 0,
            (None, None) => false,
        }
    }
}

struct CpuState {
    cluster: usize,
    busy: bool,
}

/// The CPUs at a moment.
struct CpuStates<'a> {
    machine: &'a BenchMachine,
    cpus: Vec<CpuState>,
    /// Of each cluster.
    khz: Vec<u32>,
}

impl<'a> CpuStates<'a> {
    fn at(observed: &Observed, machine: &'a BenchMachine, us: u64) -> Self {
        let cpu = |cpu: u32| {
            let mut clusters = machine.clusters.iter();
            Some(CpuState {
                cluster: clusters.position(|cluster| cluster.cpus.contains(&cpu))?,
                busy: observed.busy_at(cpu, us),
            })
        };
        let khz = |cluster: &Cluster| {
            let khz = observed.khz_at(machine, cluster, us);
            khz.unwrap_or(cluster.khz.0)
        };
        Self {
            machine,
            cpus: machine.cpus().into_iter().filter_map(cpu).collect(),
            khz: machine.clusters.iter().map(khz).collect(),
        }
    }

    /// Adds what counts of a span in which nothing changes.
    fn charge(&self, charged: &mut ChargedTime, (from, to): (u64, u64)) {
        let busy: Vec<usize> = self
            .cpus
            .iter()
            .filter(|cpu| cpu.busy)
            .map(|cpu| cpu.cluster)
            .collect();
        let speeds: Vec<u64> = busy.iter().map(|cluster| self.speed(*cluster)).collect();
        let mut counted = 0;
        for (number, cluster) in busy.iter().enumerate() {
            let others = speeds.iter().enumerate();
            let others = others.filter(|(other, _)| *other != number);
            let share = match self.machine.speed_switch {
                Some(_) => turns(others.map(|(_, speed)| *speed)),
                None => WHOLE,
            };
            let ns = (to - from) * 1000 * share / WHOLE;
            counted += ns;
            charged.busy_ns += ns;
            charged.full_ns += ns * speeds[number] / WHOLE;
            // µW in a ns are fJ.
            let uw = self.machine.clusters[*cluster].uw(self.khz[*cluster]);
            charged.pj = charged.pj.zip(uw).map(|(sum, uw)| sum + uw * ns / 1000);
        }
        let count = u64::try_from(busy.len()).unwrap_or(u64::MAX);
        // Work waits for the mean of the CPUs that do it.
        let passes = counted.checked_div(count).unwrap_or((to - from) * 1000);
        let before = charged.passed.last().map_or(0, |(_, ns)| *ns);
        charged.passed.push((to, before + passes));
    }

    /// The share of its time for which a busy CPU works, by the speed model.
    fn speed(&self, cluster: usize) -> u64 {
        let of = &self.machine.clusters[cluster];
        let full = u64::from(self.machine.big().capacity) * u64::from(of.khz.1);
        let own = u64::from(of.capacity) * u64::from(self.khz[cluster]) * WHOLE;
        own.checked_div(full).unwrap_or(WHOLE).min(WHOLE)
    }
}

/// The mean of 1/(1 + n), where n of the others work, each for its share.
fn turns(shares: impl Iterator<Item = u64>) -> u64 {
    // How likely it is that so many of those before work.
    let mut odds = vec![WHOLE];
    for share in shares {
        let mut more = vec![0; odds.len() + 1];
        for (count, odd) in odds.iter().enumerate() {
            more[count] += odd * (WHOLE - share) / WHOLE;
            more[count + 1] += odd * share / WHOLE;
        }
        odds = more;
    }
    let parts = (1..)
        .zip(&odds)
        .map(|(turns, odd): (u64, &u64)| odd / turns);
    parts.sum()
}

#[cfg(test)]
mod tests {
    //! Worked numbers: what counts of a CPU alone, of two at once, and on hardware.

    use super::*;
    use crate::measure_tests::{machine, observed, switch};

    /// CPU 1 works from 1000 to 9100 at its highest frequency; CPU 0 from 2000 to 4000.
    fn two(emulated: bool) -> (BenchMachine, Observed) {
        let mut machine = machine();
        machine.speed_switch = emulated.then(|| "on".into());
        let mut load = observed(1, &[(500, 2800)]);
        load.seen
            .changes
            .push(crate::measure_tests::change(600, 0, 1800));
        load.seen.switches.insert(1, switch(2000, 0, (0, 98)));
        load.seen.switches.insert(2, switch(4000, 0, (98, 0)));
        (machine, load)
    }

    #[test]
    fn a_cpu_alone_is_charged_all_of_its_time() {
        let (machine, load) = two(true);
        let charged = load.charged(&machine, (5000, 7000));
        assert_eq!((charged.busy_ns, charged.pj), (2_000_000, Some(2_000_000)));
        assert_eq!(charged.between(5000, 6000), 1_000_000);
    }

    #[test]
    fn of_two_at_once_each_is_charged_its_turns() {
        let (machine, load) = two(true);
        // The little one works for 329 of 1024 of its time: the big one has the stream alone for the
        // rest, and half of it else. The little one has half of it whenever it works.
        let charged = load.charged(&machine, (2000, 4000));
        let big = 2_000_000 * (1024 - 329) / 1024 + 1_000_000 * 329 / 1024;
        assert!(
            charged.busy_ns.abs_diff(big + 1_000_000) <= 4,
            "{charged:?}"
        );
        let mean = (big + 1_000_000) / 2;
        assert!(charged.between(2000, 4000).abs_diff(mean) <= 4);
        assert!(charged.between(3000, 4000).abs_diff(mean / 2) <= 4);
        // At 1 mW the big one, and the little one too.
        let nj = (big + 1_000_000) / 1000;
        assert!(charged.pj.unwrap().abs_diff(nj * 1000) <= 4_000);
    }

    #[test]
    fn on_hardware_all_time_counts() {
        let (machine, load) = two(false);
        let charged = load.charged(&machine, (1000, 5000));
        assert_eq!(charged.busy_ns, 4_000_000 + 2_000_000);
        let little = 2_000_000 * 329 / 1024;
        assert!(charged.full_ns.abs_diff(4_000_000 + little) <= 4);
        assert_eq!(charged.between(1000, 5000), 4_000_000);
    }

    #[test]
    fn idle_time_passes_and_takes_nothing() {
        let (machine, load) = two(true);
        let charged = load.charged(&machine, (9100, 9600));
        assert_eq!((charged.busy_ns, charged.between(9100, 9600)), (0, 500_000));
    }

    #[test]
    fn the_turns_of_three_equal_cpus_are_thirds() {
        assert_eq!(turns([WHOLE, WHOLE].into_iter()), WHOLE / 3);
        assert_eq!(turns([WHOLE / 2].into_iter()), WHOLE * 3 / 4);
        assert_eq!(turns([].into_iter()), WHOLE);
    }

    #[test]
    fn without_power_there_is_no_energy() {
        let (mut machine, load) = two(true);
        machine.clusters[1].power.clear();
        assert_eq!(load.charged(&machine, (5000, 7000)).pj, None);
    }
}
