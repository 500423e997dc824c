// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq demo`: a guest with a vCPU on a CPU of each kind of cluster requests each OPP; the
//! clamp, the host's frequency and what the guest reads, a row each. It needs no right but that to
//! run guests: the frequency is read from sysfs. Where the host lists no frequencies, as with CPPC,
//! it requests steps between the policy's limits.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Value, json};
use vcpufreq_device::REGION_STRIDE;
use vcpufreq_host::{HostCpus, HostRoot, PolicyFloor, Reserved, effective_clamp, floors};

use crate::args::GuestArgs;
use crate::findings::{Findings, LACKS, lacks, print, write};
use crate::freq_limits::FreqLimits;
use crate::guest::{Guest, LIMITS, keep_on};
use crate::load_client::LoadClient;
use crate::machine::{BenchMachine, Cluster};
use crate::undo;
use crate::variant::mirror;

/// A new clamp is in force at the scheduler's next event, at the latest a tick later.
const TICKS: Duration = Duration::from_millis(40);
/// The frequency is looked at so often, with a pause behind each look.
const LOOKS: u32 = 10;
const PAUSE: Duration = Duration::from_millis(2);
/// The vCPU is busy for longer than the request, the ticks and the looks take.
const BUSY_US: u32 = 250_000;
/// A vCPU that is busy for so long has all of the utilization. Before it has its clamp's, schedutil
/// holds the frequency of a CPU with a policy of its own that a task beside it has raised.
const FULL: Duration = Duration::from_millis(250);
/// How far a frequency may be from a made-up OPP, whose steps firmware doesn't have, and from any where
/// it is measured: by the clock of a PC's TSC, which is none of the steps, and for the last tick.
const WITHIN_PERCENT: u64 = 5;
/// Requests of one OPP until its row counts as wrong: a task of the host's may run beside the vCPU.
const TRIES: u32 = 5;
/// The guest's driver claims the registers; this lets the load program map them too.
const CMDLINE: &str = "iomem=relaxed";

/// Of a machine that measures, above the table.
const MEASURED: &str = "Frequencies are measured by APERF and MPERF: within 5 % is right, and turbo may exceed the highest\n";

/// Options of `demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Those of its guest.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// Write the rows as JSON
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// What came of one request; frequencies in kHz.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OppRow {
    vcpu: usize,
    pcpu: u32,
    asked: u32,
    /// The OPPs that the host may run at: the one for the request, and the one for what a server
    /// reserves. They are the same unless it isn't known what that is.
    wanted: [u32; 2],
    /// The lower and upper clamp in force, 0..=1024, if the kernel shows it.
    clamp: Option<(u32, u32)>,
    /// What the host ran at, at most looks.
    host: u32,
    /// What the guest then read.
    read: u32,
    tries: u32,
    /// The OPP is a step of a made-up table.
    made_up: bool,
    /// The frequencies were measured.
    measured: bool,
    /// What the highest OPP of a machine that measures has to reach: turbo has no frequency of its own.
    turbo_from: Option<u32>,
}

impl OppRow {
    fn right(&self) -> bool {
        let mut wanted = self.wanted.into_iter();
        wanted.any(|wanted| self.is_near(self.host, wanted) && self.is_near(self.read, wanted))
    }

    fn is_near(&self, khz: u32, wanted: u32) -> bool {
        let is_near = self.made_up || self.measured;
        let within = if is_near { WITHIN_PERCENT } else { 0 };
        let off = match self.turbo_from {
            Some(least) => least.saturating_sub(khz),
            None => khz.abs_diff(wanted),
        };
        u64::from(off) * 100 <= u64::from(wanted) * within
    }

    fn json(&self) -> Value {
        json!({
            "vcpu": self.vcpu, "pcpu": self.pcpu, "asked_khz": self.asked,
            "wanted_khz": self.wanted, "uclamp": self.clamp, "host_khz": self.host,
            "guest_reads_khz": self.read, "tries": self.tries, "made_up": self.made_up,
            "measured": self.measured, "right": self.right(),
        })
    }
}

/// [`try_opps()`], with the file of `--out`, and the table on stdout. Returns the exit code.
///
/// # Errors
/// Also when a file can't be written.
pub fn demo(args: &DemoArgs, base: u64) -> Result<u8> {
    let Some(found) = try_opps(&args.guest, base)? else {
        return Ok(LACKS);
    };
    let json = format!("{:#}\n", found.json);
    write(args.out.as_deref().map(|out| (out, json)))?;
    print(&found.text)?;
    Ok(found.exit_code)
}

/// Boots the guest, and requests each OPP of each kind of cluster, up and down. `base` is the
/// guest-physical address of the registers. The exit code is 1 when a row is wrong. `None` on a host
/// that can't run it: stderr then names what it lacks.
///
/// # Errors
/// What ended it before the table was complete, in one line.
pub fn try_opps(args: &GuestArgs, base: u64) -> Result<Option<Findings>> {
    let begun = Instant::now();
    undo::begin()?;
    let machine = match BenchMachine::check(Some(args), true, None) {
        Ok(machine) => machine.with_tables(),
        Err(missing) => return Ok(lacks(&missing)),
    };
    let without: Vec<String> = machine.clusters.iter().filter_map(no_opps).collect();
    if !without.is_empty() {
        return Ok(lacks(&without));
    }
    args.print_note();
    let _governors = FreqLimits::governors(&machine)?;
    let tried = machine.one_of_each_kind();
    let rows = tried.clusters.iter().map(|one| 2 * one.opps_khz.len());
    let seconds = rows.sum::<usize>() * 3 / 10;
    eprintln!("vcpufreq: every OPP of each cluster takes about {seconds} s after the boot");
    let options = ["--clamp", "exact"];
    let mut guest = Guest::boot(&tried, (mirror(Some(&[])), &options), CMDLINE, args)?;
    let kernel = guest.console.ask("read /proc/sys/kernel/osrelease")?;
    let root = HostRoot::default();
    let floors = floors(&root, &HostCpus::read(&root));
    let mut rows = Vec::new();
    for vcpu in 0..guest.vcpus.len() {
        rows.extend(sweep(&mut guest, vcpu, (&machine, &floors), base)?);
    }
    guest.console.end()?;
    let wrong = rows.iter().filter(|row| !row.right()).count();
    let report = json!({
        "held": wrong == 0, "board": machine.board, "host_kernel": machine.kernel,
        "guest_kernel": kernel, "elapsed_s": begun.elapsed().as_secs(), "opps_checked": rows.len(), "opps_wrong": wrong,
        "rows": rows.iter().map(OppRow::json).collect::<Vec<_>>(),
    });
    Ok(Some(Findings {
        text: text(&machine, &kernel, &rows),
        json: report,
        exit_code: u8::from(wrong > 0),
    }))
}

/// Why a cluster has nothing to request, if so.
fn no_opps(cluster: &Cluster) -> Option<String> {
    cluster.opps_in_reach().next().is_none().then(|| {
        format!(
            "no frequency of cpufreq {} is within its scaling_min_freq and scaling_max_freq; write cpuinfo_min_freq to the first and cpuinfo_max_freq to the second",
            cluster.policy()
        )
    })
}

/// Requests each OPP of a vCPU's cluster, up and then down.
fn sweep(
    guest: &mut Guest,
    vcpu: usize,
    (machine, floors): (&BenchMachine, &[PolicyFloor]),
    base: u64,
) -> Result<Vec<OppRow>> {
    let (pcpu, _) = guest.vcpus[vcpu];
    let cluster = machine
        .cluster_of(pcpu)
        .context("a vCPU without a cluster")?;
    if let Some(other) = machine.aside_of(pcpu) {
        let own = [std::process::id()];
        // Where a cpuset forbids that, a row takes more tries.
        let _ = keep_on(guest.processes.iter().copied().chain(own), &[other]);
    }
    request_by_userspace(&mut guest.console, vcpu)?;
    let floor = floors.iter().find(|floor| floor.cpus.contains(pcpu));
    let opps: Vec<u32> = cluster.opps_in_reach().collect();
    // Without a table on the host, a floor is no step of one.
    let host_opps = if cluster.made_up { &[][..] } else { &opps };
    let each = opps.iter().chain(opps.iter().rev().skip(1));
    each.map(|&asked| {
        let wanted = wanted(host_opps, asked, floor);
        let turbo_from = turbo_from(machine.measured, cluster.made_up, &opps, asked);
        let mut request = |tries, busy_before| -> Result<OppRow> {
            let of = (asked, wanted);
            Ok(OppRow {
                tries,
                measured: machine.measured,
                turbo_from,
                ..request(guest, vcpu, cluster, of, (base, busy_before))?
            })
        };
        let mut row = request(1, Duration::ZERO)?;
        while !row.right() && row.tries < TRIES {
            row = request(row.tries + 1, FULL)?;
        }
        Ok(row)
    })
    .collect()
}

/// Gives a guest's policy the governor `userspace`, after `performance` has made a request: before a
/// policy's first request `userspace` is a BUG in a guest with the kernel's own driver
/// (contrib/upstream/virtual-cpufreq-policy-cur.txt).
fn request_by_userspace(console: &mut LoadClient, vcpu: usize) -> Result<()> {
    let file = policy_file(vcpu, "scaling_governor");
    for governor in ["performance", "userspace"] {
        console
            .ask(&format!("write {file} {governor}"))
            .with_context(|| {
                let option = governor.to_uppercase();
                format!("the guest's kernel needs CONFIG_CPU_FREQ_GOV_{option}")
            })?;
    }
    Ok(())
}

/// The OPPs that a request for this one may lead to.
fn wanted(opps: &[u32], asked: u32, floor: Option<&PolicyFloor>) -> [u32; 2] {
    let Some(floor) = floor else {
        return [asked; 2];
    };
    let reserved = at_least(opps, asked.max(floor.floor.khz));
    match floor.reserved {
        // debugfs, which has what is in force, is root's.
        Reserved::Default(_) => [asked, reserved],
        _ => [reserved; 2],
    }
}

/// What the highest of these OPPs has to reach where frequencies are measured. It stands for turbo, as
/// acpi-cpufreq's (1 MHz above the next), or is the highest one of turbo, as the last made-up step: what
/// turbo gives depends on heat and on other cores.
fn turbo_from(measured: bool, made_up: bool, opps: &[u32], asked: u32) -> Option<u32> {
    let is_last = measured && opps.last() == Some(&asked);
    let below = opps.iter().rev().nth(usize::from(made_up));
    is_last.then(|| below.copied().unwrap_or(asked))
}

fn request(
    guest: &mut Guest,
    vcpu: usize,
    cluster: &Cluster,
    (asked, wanted): (u32, [u32; 2]),
    (base, busy_before): (u64, Duration),
) -> Result<OppRow> {
    let (pcpu, tid) = guest.vcpus[vcpu];
    let speed = policy_file(vcpu, "scaling_setspeed");
    let register = base + REGION_STRIDE * u64::try_from(vcpu)?;
    let ask = |guest: &mut Guest, line: &str| guest.console.ask(line);
    let busy_us = BUSY_US + u32::try_from(busy_before.as_micros())?;
    ask(guest, &format!("start demo pin={vcpu} busy={busy_us}"))?;
    sleep(busy_before);
    ask(guest, &format!("write {speed} {asked}"))?;
    sleep(TICKS);
    let host = most(|| cluster.now_khz())?;
    let clamp = clamp_of(tid);
    let line = match guest.qemu {
        // In memory wherever QEMU has put it: the driver knows.
        true => format!("read {}", policy_file(vcpu, "host_cur_freq")),
        false => format!("peek {vcpu} {register:#x}"),
    };
    let read = ask(guest, &line)?.parse()?;
    ask(guest, "join demo")?;
    Ok(OppRow {
        vcpu,
        pcpu,
        asked,
        wanted,
        clamp,
        host,
        read,
        tries: 1,
        made_up: cluster.made_up,
        measured: false,
        turbo_from: None,
    })
}

/// The frequency that was seen at most of the looks; the middle one where they all differ.
fn most(look: impl Fn() -> Option<u32>) -> Result<u32> {
    let mut seen = BTreeMap::new();
    for _ in 0..LOOKS {
        let khz = look().context("the host's frequency can't be read")?;
        *seen.entry(khz).or_insert(0) += 1;
        sleep(PAUSE);
    }
    let middle = seen.keys().nth((seen.len() - 1) / 2).copied();
    let most = seen.iter().max_by_key(|(_, times)| **times);
    let most = most.filter(|(_, times)| **times > 1);
    most.map(|(khz, _)| *khz).or(middle).context("no look")
}

fn policy_file(vcpu: usize, file: &str) -> String {
    format!("/sys/devices/system/cpu/cpufreq/policy{vcpu}/{file}")
}

/// The lowest OPP that is at least this one.
fn at_least(opps: &[u32], khz: u32) -> u32 {
    let found = opps.iter().find(|opp| **opp >= khz).or(opps.last());
    found.copied().unwrap_or(khz)
}

/// The clamp of a thread, its cgroup's included.
fn clamp_of(tid: i32) -> Option<(u32, u32)> {
    effective_clamp(&std::fs::read_to_string(format!("/proc/{tid}/sched")).ok()?)
}

fn text(machine: &BenchMachine, kernel: &str, rows: &[OppRow]) -> String {
    let mhz = |khz: u32| khz / 1000;
    let measured = if machine.measured { MEASURED } else { "" };
    let mut text = format!(
        "\n{}: Linux {}; guest: Linux {kernel}, a busy vCPU on a CPU of each cluster\n{LIMITS}{measured}\n\
         \x20 vCPU  pCPU | guest asks   uclamp of thread   host runs at   guest reads\n\
         \x20            |      [MHz]          [0..1024]          [MHz]         [MHz]\n",
        machine.board, machine.kernel
    );
    for row in rows {
        let clamp = row.clamp.map(|(min, max)| format!("{min}..{max}"));
        // A String takes all that is written to it.
        let _ = writeln!(
            text,
            "  {:>4}  {:>4} | {:>10}   {:>16}   {:>12}   {:>11}{}",
            row.vcpu,
            row.pcpu,
            mhz(row.asked),
            clamp.as_deref().unwrap_or("-"),
            mhz(row.host),
            mhz(row.read),
            if row.right() { "" } else { "  wrong" },
        );
    }
    text + &verdict(machine, rows)
}

/// How many rows are wrong, and what is to be known of the others.
fn verdict(machine: &BenchMachine, rows: &[OppRow]) -> String {
    let wrong = rows.iter().filter(|row| !row.right()).count();
    let verdict = match wrong {
        0 => "The loop is closed",
        _ => "The loop is not closed",
    };
    let clusters = &machine.clusters;
    let all = |cluster: &Cluster| cluster.opps_khz.len() - cluster.opps_in_reach().count();
    let beyond: usize = clusters.iter().map(all).sum();
    let alike = clusters.len() - machine.one_of_each_kind().clusters.len();
    let floors = rows.iter().filter(|row| row.wanted[1] != row.asked).count();
    let made_up = rows.iter().filter(|row| row.made_up).count();
    let made_up_note = format!(
        "OPPs are steps that the demo made, since the host lists no frequencies; within {WITHIN_PERCENT} % is right"
    );
    let notes = [
        (
            floors,
            "requests are below what the scheduler's servers reserve (vcpufreq doctor)",
        ),
        (
            beyond,
            "OPPs are beyond scaling_min_freq and scaling_max_freq, and were not requested",
        ),
        (made_up, &made_up_note),
        (
            alike,
            "clusters are equal to one of these, and were not tried",
        ),
    ];
    let mut text = format!("\n{verdict}: {wrong} of {} OPPs wrong\n", rows.len());
    for (count, note) in notes.iter().filter(|(count, _)| *count > 0) {
        // A String takes all that is written to it.
        let _ = writeln!(text, "{count} {note}");
    }
    text
}

#[cfg(test)]
mod tests {
    //! Promises: a row is right when host and guest have the wanted frequency, or are near one of a
    //! made-up table, or of any where they are measured; the clamp is the effective one; a look at another frequency doesn't outvote the
    //! others; a guest's policy makes a request before it gets `userspace`.
    use super::*;
    use crate::measure_tests::machine;

    /// A guest's console, whose kernel ends at `userspace` before another governor has made a request.
    const GUEST_WITHOUT_REQUEST: &str = r#"echo @ready
        while read -r line; do
            case $line in
            *performance) asked=1 ;;
            *userspace) [ $asked ] || exit 1 ;;
            esac
            echo @ok
        done"#;

    #[test]
    fn a_request_precedes_userspace() {
        let mut guest = std::process::Command::new("sh");
        guest.args(["-c", GUEST_WITHOUT_REQUEST]);
        let mut console = LoadClient::start(guest).expect("a console");
        request_by_userspace(&mut console, 0).expect("the guest lives");
    }

    #[test]
    fn a_row_is_right_when_host_and_guest_agree() {
        let row = OppRow {
            vcpu: 0,
            pcpu: 0,
            asked: 600_000,
            wanted: [900_000; 2],
            clamp: None,
            host: 900_000,
            read: 900_000,
            tries: 1,
            made_up: false,
            measured: false,
            turbo_from: None,
        };
        assert!(row.right());
        let wrong = [
            OppRow {
                host: 600_000,
                ..row
            },
            OppRow {
                read: 600_000,
                ..row
            },
        ];
        assert!(wrong.iter().all(|row| !row.right()));
        let either = OppRow {
            wanted: [900_000, 1_000_000],
            ..row
        };
        assert!(either.right());
        for (host, right) in [
            (945_000, true),
            (946_000, false),
            (855_000, true),
            (854_000, false),
        ] {
            let near = OppRow { host, ..row };
            assert!(!near.right());
            let made_up = OppRow {
                made_up: true,
                ..near
            };
            assert_eq!(made_up.right(), right, "{host}");
            let text = verdict(&machine(), &[made_up]);
            assert!(
                text.contains("1 OPPs are steps") && text.contains("within 5 %"),
                "{text}"
            );
        }
        assert_eq!(at_least(&[600_000, 900_000], 700_000), 900_000);
        assert_eq!(at_least(&[600_000, 900_000], 950_000), 900_000);
    }

    #[test]
    fn what_is_measured_is_near_and_turbo_is_above() {
        let opps = [1_600_000, 2_800_000, 2_801_000];
        let row = |made_up, asked, [host, read]: [u32; 2]| OppRow {
            vcpu: 0,
            pcpu: 0,
            asked,
            wanted: [asked; 2],
            clamp: None,
            host,
            read,
            tries: 1,
            made_up,
            measured: true,
            turbo_from: turbo_from(true, made_up, &opps, asked),
        };
        for (made_up, asked, seen, right) in [
            (false, 1_600_000, [1_596_132, 1_680_000], true),
            (false, 1_600_000, [1_596_132, 1_681_000], false),
            (false, 2_800_000, [2_600_000, 2_800_000], false),
            // acpi-cpufreq's turbo, and one that the firmware keeps off.
            (false, 2_801_000, [3_412_000, 2_801_000], true),
            (false, 2_801_000, [2_793_000, 2_793_000], true),
            (false, 2_801_000, [2_600_000, 2_801_000], false),
            (true, 2_801_000, [2_700_000, 2_801_000], true),
        ] {
            assert_eq!(
                row(made_up, asked, seen).right(),
                right,
                "{asked}: {seen:?}"
            );
        }
        assert_eq!(turbo_from(false, true, &opps, 2_801_000), None);
        let measured = BenchMachine {
            measured: true,
            ..machine()
        };
        let heads = [machine(), measured].map(|one| text(&one, "", &[]).contains("APERF"));
        assert_eq!(heads, [false, true]);
    }

    #[test]
    fn most_looks_decide() {
        let looks = std::cell::Cell::new(0);
        let look = || {
            looks.set(looks.get() + 1);
            Some(if looks.get() == 3 { 1_800_000 } else { 600_000 })
        };
        assert_eq!(most(look).ok(), Some(600_000));
        let next = std::cell::Cell::new(600_000);
        let rising = || Some(next.replace(next.get() + 10));
        assert_eq!(
            most(rising).ok(),
            Some(600_040),
            "without steps, the middle"
        );
        assert!(most(|| None).is_err());
    }
}
