// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq policy` beside a running guest: the clamp follows a policy that is loaded, the clock that
//! it reads, its reset and the end of the guardian that holds it, without a request of the guest's.
//! `policy show`, `stats` and `trace` name it. `--vm all` is each guest of the user. What is refused has
//! exit code 2, one line, and changes nothing. Changes beside a guest that requests lose no request, and
//! cost no exit to the VMM. Of a guest that has lost the path, no policy is shown, and none is loaded.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::architecture::HERE;
use crate::harness::clock::set_hour;
use crate::harness::frequency::host_runs_at;
use crate::harness::plan::{Plan, ask_for, first_cpus, last_of, set_governor};
use crate::harness::policy::Policy;
use crate::harness::stats;
use crate::harness::trace::exits::kvm_statistic;
use crate::harness::vm::Vm;
use crate::harness::wait::settled;
use crate::scenarios::paths::fallbacks::take_program_away;

/// By the program; `bpf-policy` makes 1,000.
const CHANGES: u32 = 50;
const NOBODY: u32 = 65534;
const BY_BPF: [&str; 2] = ["--path", "bpf"];
const TRACE: &str = "/tmp/policy-trace.json";
/// The VMM looks ten times a second.
const LOOKS: Duration = Duration::from_secs(5);

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (vcpu, policy) = last_of(&policies)?;
    let options = ["--clamp", "floor", "--sum=false"];
    let mut setup = plan.mirroring(&first_cpus(&policies)).with(&options);
    setup = setup.with(&BY_BPF);
    setup.silent = true;
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, vcpu, "userspace")?;
    vm.ask(format!("start busy busy {vcpu}"))?;
    let mut guest = DecidedGuest { vm, vcpu, policy };
    let follows = guest.follows()?;
    let refused = guest.refused()?;
    let changes = guest.changes()?;
    let for_all = guest.for_all(plan, policies[0].cpu())?;
    let lost = lost(plan, &policies[0])?;
    let ends = guest.ends()?;
    // Without a guardian it doesn't tidy up.
    guest.vm.kill()?;
    let cleaned = Command::new("/bin/vcpufreq").arg("cleanup").output()?;
    Ok(LabVerdict::default()
        .part("follows", follows)
        .part("refused", refused)
        .part("changes", changes)
        .part("for_all", for_all)
        .part("lost", lost)
        .part("ends", ends)
        .check_eq("all is cleaned up", &cleaned.status.code(), Some(0)))
}

/// A guest whose last vCPU is busy.
struct DecidedGuest<'a> {
    vm: Vm,
    vcpu: usize,
    policy: &'a Policy,
}

impl DecidedGuest<'_> {
    fn follows(&mut self) -> Result<LabVerdict> {
        let policy = self.policy;
        let [low, high] = [policy.min(), policy.max()];
        let [least, most] = [low, high].map(|khz| policy.util(khz));
        ask_for(&mut self.vm, self.vcpu, low)?;
        let built_in = self.settled((least, 1024))?;
        self.load("margin")?;
        let margin = self.settled((least + least / 10, 1024))?;
        ask_for(&mut self.vm, self.vcpu, high)?;
        let limited = self.settled((most, 1024))?;
        self.load("night")?;
        let capped = (most / 2, most / 2);
        let (by_night, runs_at) = set_hour(23, || {
            let clamp = self.settled(capped)?;
            Ok((clamp, host_runs_at(policy, &mut self.vm, high)?))
        })?;
        let by_day = set_hour(12, || self.settled((most, 1024)))?;
        let shown = shown(self.vm.program())?;
        let stats = stats::of(&self.vm)?;
        let causes = self.causes()?;
        self.reset()?;
        ask_for(&mut self.vm, self.vcpu, low)?;
        let reset = self.settled((least, 1024))?;
        let causes = [causes, self.causes()?];
        let figures = json!({ "shown": shown, "runs_at_night_khz": runs_at });
        Ok(LabVerdict::with_figures(figures)
            .check_eq("the built-in rule", &built_in, (least, 1024))
            .check_eq(
                "a margin, without a request",
                &margin,
                (least + least / 10, 1024),
            )
            .check_eq("a margin's limit", &limited, (most, 1024))
            .check_eq("a cap by night", &by_night, capped)
            .check("by which the host runs", runs_at < high, runs_at)
            .check_eq("none by day, without a request", &by_day, (most, 1024))
            .check_eq("it is shown", &shown["policy"]["name"], json!("night"))
            .check("with its questions", shown["policy"]["asked"] != 0, &shown)
            .check_eq(
                "stats name it",
                &stats["decided_by"]["name"],
                json!("night"),
            )
            .check_eq("the built-in rule after a reset", &reset, (least, 1024))
            .check_eq(
                "a trace names what clamps are by",
                &causes,
                ["policy", "guest"].map(|cause| BTreeSet::from([cause.to_owned()])),
            ))
    }

    fn refused(&mut self) -> Result<LabVerdict> {
        let least = self.policy.util(self.policy.min());
        self.load("margin")?;
        let pid = self.vm.program().to_string();
        let mut verdict = LabVerdict::default();
        let objects = [
            "policy_nonsense",
            "policy_loop",
            "policy_range",
            "policy_slow",
            "allowed",
        ];
        let bad = objects.map(|name| (format!("/lab/bpf/{name}.bpf.o"), pid.clone(), 0));
        let good = "/lab/bpf/night.bpf.o".to_owned();
        let others = [
            ("/lab/bpf/no-such.bpf.o".to_owned(), pid.clone(), 0),
            (good.clone(), "1".to_owned(), 0),
            (good, pid, NOBODY),
        ];
        for (file, pid, user) in bad.into_iter().chain(others) {
            let output = run_as(&["load", &file, "--vm", &pid], user)?;
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let right = output.status.code() == Some(2) && said.lines().count() == 1;
            verdict = verdict.check(&format!("{file} for {pid} by {user}"), right, said);
        }
        let clamp = self.settled((least + least / 10, 1024))?;
        Ok(verdict.check_eq("the one before stays", &clamp, (least + least / 10, 1024)))
    }

    /// Beside a guest whose own governor requests.
    fn changes(&mut self) -> Result<LabVerdict> {
        let vcpu = self.vcpu;
        self.vm.ask("stop busy")?;
        set_governor(&mut self.vm, vcpu, "schedutil")?;
        self.vm
            .ask(format!("start load periodic {vcpu} 100000 50000"))?;
        let before = stats::of(&self.vm)?;
        let exits = kvm_statistic(HERE.mmio_exits)?;
        for number in 0..CHANGES {
            self.load(["margin", "boost"][usize::from(number % 2 == 1)])?;
        }
        let exits = kvm_statistic(HERE.mmio_exits)? - exits;
        let after = stats::of(&self.vm)?;
        self.vm.ask("stop load")?;
        let of = |stats: &Value| stats["vcpus"][vcpu]["counts"]["requests"].as_u64();
        let requests = of(&after).zip(of(&before)).map(|(now, then)| now - then);
        let requests = requests.context("no requests in the stats")?;
        let settled = stats::of(&self.vm)?;
        let once = stats::has_one_outcome_each(&settled["vcpus"][vcpu]);
        let figures = json!({ "changes": CHANGES, "requests": requests });
        Ok(LabVerdict::with_figures(figures)
            .check("it requests", requests > 0, requests)
            .check(
                "each request has one outcome",
                once,
                &settled["vcpus"][vcpu],
            )
            .check_eq("no access exits to the VMM", &exits, 0))
    }

    /// Another guest has what this one has.
    fn for_all(&mut self, plan: &Plan, pcpu: u32) -> Result<LabVerdict> {
        let mut setup = plan.mirroring(&[pcpu]).with(&BY_BPF);
        setup.silent = true;
        let other = plan.guest(&setup)?;
        let all = |verb: &[&str]| policy(&[verb, &["--vm", "all"]].concat());
        let mut has = Vec::new();
        let mut codes = Vec::new();
        for verb in [
            &["load", "/lab/bpf/margin.bpf.o"][..],
            &["load", "/lab/bpf/policy_nonsense.bpf.o"],
            &["reset"],
        ] {
            codes.push(all(verb)?.status.code());
            has.push(
                [self.vm.program(), other.program()]
                    .map(|pid| Some(shown(pid).ok()?["policy"]["name"].clone())),
            );
        }
        other.quit()?;
        let margin = || Some(json!("margin"));
        Ok(LabVerdict::default()
            .check_eq("taken, refused, reset", &codes, [0, 2, 0].map(Some))
            .check_eq("both have it", &has[0], [margin(), margin()])
            .check_eq(
                "what is refused changes none",
                &has[1],
                [margin(), margin()],
            )
            .check_eq(
                "both have none",
                &has[2],
                [Some(Value::Null), Some(Value::Null)],
            ))
    }

    /// The end of what holds the policy is the policy's.
    fn ends(&mut self) -> Result<LabVerdict> {
        let least = self.policy.util(self.policy.min());
        let vcpu = self.vcpu;
        set_governor(&mut self.vm, vcpu, "userspace")?;
        ask_for(&mut self.vm, vcpu, self.policy.min())?;
        self.load("margin")?;
        let margin = self.settled((least + least / 10, 1024))?;
        kill(guardian_of(self.vm.program())?, Signal::SIGKILL)?;
        let back = self.settled((least, 1024))?;
        let pid = self.vm.program().to_string();
        let gone = policy(&["show", "--vm", &pid])?;
        let named = || Ok(stats::of(&self.vm)?["decided_by"].clone());
        let named = settled(LOOKS, named, Value::is_null)?;
        Ok(LabVerdict::default()
            .check_eq("it is in force", &margin, (least + least / 10, 1024))
            .check_eq("the built-in rule is back", &back, (least, 1024))
            .check_eq("stats name none", &named, Value::Null)
            .check_eq("there is nobody to ask", &gone.status.code(), Some(2)))
    }

    fn settled(&self, clamp: (u32, u32)) -> Result<(u32, u32)> {
        self.vm.settled_clamp(self.vcpu, clamp)
    }

    fn load(&self, name: &str) -> Result<()> {
        let (file, pid) = (format!("/lab/bpf/{name}.bpf.o"), self.vm.program());
        succeeded(&["load", &file, "--vm", &pid.to_string()]).map(drop)
    }

    fn reset(&self) -> Result<()> {
        succeeded(&["reset", "--vm", &self.vm.program().to_string()]).map(drop)
    }

    /// What a trace says this vCPU's clamps are by.
    fn causes(&self) -> Result<BTreeSet<String>> {
        let pid = self.vm.program().to_string();
        let words = ["trace", &pid, "--for", "100ms", "--out", TRACE];
        let output = Command::new("/bin/vcpufreq").args(words).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "trace: {said}");
        let trace: Value = serde_json::from_slice(&fs::read(TRACE)?)?;
        let events = trace["traceEvents"].as_array().context("no events")?;
        let clamps = events.iter().filter(|one| {
            let is_clamp = one["name"]
                .as_str()
                .is_some_and(|of| of.starts_with("uclamp "));
            // Track 0 has a meaning of its own.
            is_clamp && one["tid"] == self.vcpu + 1
        });
        let causes = clamps.filter_map(|one| Some(one["args"]["by"].as_str()?.to_owned()));
        Ok(causes.collect())
    }
}

/// A guest whose policy is in force when its VMM takes over from the programs.
fn lost(plan: &Plan, policy: &Policy) -> Result<LabVerdict> {
    let mut setup = plan.mirroring(&[policy.cpu()]);
    setup.silent = true;
    let mut vm = plan.guest(&setup)?;
    let pid = vm.program().to_string();
    let load = ["load", "/lab/bpf/margin.bpf.o", "--vm", &pid];
    succeeded(&load)?;
    let before = shown(vm.program())?["policy"]["name"].clone();
    take_program_away()?;
    set_governor(&mut vm, 0, "userspace")?;
    let mut khz = [policy.max(), policy.min()].into_iter().cycle();
    let path = || {
        // A request that no program sees.
        ask_for(&mut vm, 0, khz.next().unwrap_or_default())?;
        Ok(stats::of(&vm)?["vcpus"][0]["path"].clone())
    };
    let path = settled(LOOKS, path, |path| *path == "ioeventfd")?;
    let after = shown(vm.program())?["policy"].clone();
    let refused = run_as(&load, 0)?;
    let lines = String::from_utf8_lossy(&refused.stderr).into_owned();
    let named = stats::of(&vm)?["decided_by"].clone();
    vm.quit()?;
    Ok(LabVerdict::default()
        .check_eq("it is in force", &before, json!("margin"))
        .check_eq("the path is lost", &path, json!("ioeventfd"))
        .check_eq("none is shown", &after, Value::Null)
        .check_eq("stats name none", &named, Value::Null)
        .check_eq("none is loaded", &refused.status.code(), Some(2))
        .check("which a line tells", lines.lines().count() == 1, &lines))
}

/// What `policy show` has of a guest.
fn shown(pid: u32) -> Result<Value> {
    let all = succeeded(&["show", "--json"])?;
    let all: Vec<Value> = serde_json::from_slice(&all)?;
    let mut own = all.into_iter().filter(|one| one["pid"] == pid);
    own.next().context("the guest isn't shown")
}

fn policy(words: &[&str]) -> Result<Output> {
    run_as(words, 0)
}

fn run_as(words: &[&str], user: u32) -> Result<Output> {
    let mut command = Command::new("/bin/vcpufreq");
    Ok(command.arg("policy").args(words).uid(user).output()?)
}

fn succeeded(words: &[&str]) -> Result<Vec<u8>> {
    let output = policy(words)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{words:?}: {said}");
    Ok(output.stdout)
}

fn guardian_of(vmm: u32) -> Result<Pid> {
    let wanted = format!("\0guardian\0{vmm}\0");
    for entry in fs::read_dir("/proc")?.flatten() {
        let pid = entry.file_name();
        let Some(pid) = pid.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // One that ends meanwhile is another one.
        let line = fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
        if line.contains(&wanted) {
            return Ok(Pid::from_raw(pid));
        }
    }
    anyhow::bail!("process {vmm} has no guardian")
}
