// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs on the host set floors and ceilings by `vcpufreq tune`, by each path: clamp and frequency
//! of the vCPU are those of floor, ceiling and request together, and of the request alone when the
//! programs end: the clamp of a vCPU that is busy and makes no request is back within 100 ms of a time's
//! end, of `untune`, and of each of 50 times kill -9. What is no call has exit code 2, one line, and
//! changes nothing.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::frequency::host_runs_at;
use crate::harness::plan::{Plan, ask_for, first_cpus, last_of, set_governor};
use crate::harness::policy::Policy;
use crate::harness::stats;
use crate::harness::vm::Vm;
use crate::harness::vmm::Vmm;
use crate::harness::wait::{SOON, settled};

const PATHS: [&str; 5] = ["exit", "ioeventfd", "shm", "ram", "bpf"];
/// Of clients, by the last path; by the others there are few.
const KILLS: usize = 50;
const FEW_KILLS: usize = 3;
/// The clamp is back within this of a client's end.
const BACK: Duration = Duration::from_millis(100);
/// How long a tuning of a time lasts, and how much longer its clamp may.
const LASTS: Duration = Duration::from_millis(200);
const NOBODY: u32 = 65534;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let paths: Vec<Option<&str>> = match plan.vmm {
        // Its guests have shared memory.
        Vmm::Qemu => vec![None],
        Vmm::Vcpufreq | Vmm::Crosvm => PATHS.map(Some).into(),
    };
    let last = paths.len() - 1;
    let paths = paths.into_iter().enumerate();
    let results: Vec<Value> = paths
        .map(|(number, path)| {
            let kills = if number == last { KILLS } else { FEW_KILLS };
            by_path(plan, &policies, path, kills).with_context(|| format!("path {path:?}"))
        })
        .collect::<Result<_>>()?;
    Ok(LabVerdict::default()
        .check_rows("each path", &results)
        .figure("by_path", results))
}

/// A guest whose last vCPU is busy and requests exact frequencies.
struct TunedGuest<'a> {
    vm: Vm,
    vcpu: usize,
    policy: &'a Policy,
    has_lowest: bool,
    wrong: Vec<Value>,
}

fn by_path(plan: &Plan, policies: &[Policy], path: Option<&str>, kills: usize) -> Result<Value> {
    let (vcpu, policy) = last_of(policies)?;
    let mut setup = plan
        .mirroring(&first_cpus(policies))
        .with(&["--clamp", "exact"]);
    setup.silent = true;
    if let Some(path) = path {
        setup = setup.with(&["--path", path]);
    }
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, vcpu, "userspace")?;
    vm.ask(format!("start busy busy {vcpu}"))?;
    let mut guest = TunedGuest {
        vm,
        vcpu,
        policy,
        has_lowest: path != Some("ram"),
        wrong: Vec::new(),
    };
    guest.floors_and_ceilings()?;
    let slept = guest.vm.sleeps(vcpu)?;
    guest.ends()?;
    let refused = guest.refusals()?;
    let slowest = guest.kills(kills)?;
    let sleeps = guest.vm.sleeps(vcpu)? - slept;
    guest.check("the vCPU was busy all the time", sleeps == 0);
    let TunedGuest { vm, wrong, .. } = guest;
    vm.quit()?;
    Ok(json!({
        "right": wrong.is_empty() && slowest <= BACK && refused,
        "path": path, "wrong": wrong, "kills": kills, "slowest_back_us": slowest.as_micros(),
    }))
}

impl TunedGuest<'_> {
    /// The third OPP as a floor, and the second as a ceiling.
    fn bounds(&self) -> Result<[u32; 2]> {
        let opps = &self.policy.opps;
        let [_, ceiling, floor, ..] = opps[..] else {
            anyhow::bail!("too few OPPs: {opps:?}");
        };
        Ok([floor, ceiling])
    }

    fn floors_and_ceilings(&mut self) -> Result<()> {
        let ([floor, ceiling], policy) = (self.bounds()?, self.policy);
        ask_for(&mut self.vm, self.vcpu, policy.min())?;
        self.runs_at("the lowest request", policy.min())?;
        let one = self.client("--floor", floor)?;
        self.runs_at("a floor above it", floor)?;
        self.shown(&one, "floor_khz", floor)?;
        ask_for(&mut self.vm, self.vcpu, policy.max())?;
        self.runs_at("a request above the floor", policy.max())?;
        let other = self.client("--ceiling", ceiling)?;
        self.runs_at("a ceiling below both", ceiling)?;
        one.kill()?;
        self.runs_at("the ceiling alone", ceiling)?;
        other.kill()?;
        self.runs_at("the request alone", policy.max())?;
        ask_for(&mut self.vm, self.vcpu, policy.min())?;
        self.runs_at("the lowest request again", policy.min())
    }

    /// By their time, by `untune`, and by the end of a command.
    fn ends(&mut self) -> Result<()> {
        let ([floor, _], pid) = (self.bounds()?, self.vm.program().to_string());
        let begun = Instant::now();
        let lasts = format!("{}ms", LASTS.as_millis());
        let mut timed = Client::start(&self.options("--floor", floor, &lasts))?;
        // It is in force by now, and so lasts no longer than from now on.
        let ended = Instant::now() + LASTS;
        self.has("within its time", floor)?;
        self.is_back("behind its time", ended)?;
        self.check("not before it", begun.elapsed() >= LASTS);
        self.check("ends by its time", timed.child.wait()?.success());
        let one = self.client("--floor", floor)?;
        self.has("before untune", floor)?;
        let longer = tune(&["retune", &pid, &one.handle, "--for", "120s"])?;
        let left = self.tunings()?[0]["left_ms"].as_u64();
        let is_longer = left.is_some_and(|left| left > 60_000);
        self.check("retune", longer.status.success() && is_longer);
        let ended = tune(&["untune", &pid, &one.handle])?;
        self.is_back("behind untune", Instant::now())?;
        self.check("untune", ended.status.success());
        let mut one = one;
        self.check("its client ends", one.child.wait()?.success());
        let mut with_command = self.options("--floor", floor, "60s");
        with_command.extend(["--", "/bin/vcpufreq", "cleanup", "--nope"].map(str::to_owned));
        let ran = tune(&with_command)?;
        self.check("has its command's code", ran.status.code() == Some(2));
        self.has("behind its command", self.policy.min())
    }

    /// The clamp is the lowest request's again, within [`BACK`] of `ended`.
    fn is_back(&mut self, what: &str, ended: Instant) -> Result<()> {
        self.has(what, self.policy.min())?;
        let took = ended.elapsed();
        if took > BACK {
            self.wrong
                .push(json!({ "what": what, "back_us": took.as_micros() }));
        }
        Ok(())
    }

    /// What is no call; whether nothing has changed, with exit code 2 and one line.
    fn refusals(&mut self) -> Result<bool> {
        let pid = self.vm.program().to_string();
        let high = self.policy.max() + 1;
        // Registers in RAM tell no lowest frequency.
        let low = match self.has_lowest {
            true => self.policy.min() - 1,
            false => high + 1,
        };
        let mut calls: Vec<(Vec<String>, u32)> = [low, high]
            .map(|khz| (self.options("--floor", khz, "1s"), 0))
            .into();
        for call in [
            &["untune", &pid, "999999"][..],
            &["retune", &pid, "999999", "--for", "1s"],
            &["tune", "1", "--vcpu", "0", "--floor", "1", "--for", "1s"],
            &["tune", &pid, "--vcpu", "511", "--floor", "1", "--for", "1s"],
        ] {
            calls.push((call.iter().map(|&word| word.to_owned()).collect(), 0));
        }
        calls.push((self.options("--floor", self.policy.max(), "1s"), NOBODY));
        let mut right = true;
        for (call, user) in calls {
            let output = tune_as(&call, user)?;
            let lines = String::from_utf8_lossy(&output.stderr).lines().count();
            if output.status.code() != Some(2) || lines != 1 {
                right = false;
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                self.wrong
                    .push(json!({ "call": call, "user": user, "said": said }));
            }
        }
        self.has("behind refusals", self.policy.min())?;
        Ok(right && self.tunings()?.is_empty())
    }

    /// The longest time from a client's kill -9 until the clamp is back.
    fn kills(&mut self, count: usize) -> Result<Duration> {
        let max = self.policy.util(self.policy.max());
        let min = self.policy.util(self.policy.min());
        let mut slowest = Duration::ZERO;
        for _ in 0..count {
            let client = self.client("--floor", self.policy.max())?;
            ensure!(
                self.vm.settled_clamp(self.vcpu, (max, max))? == (max, max),
                "no floor"
            );
            let killed = Instant::now();
            client.kill()?;
            let (vm, vcpu) = (&self.vm, self.vcpu);
            let back = settled(SOON, || vm.clamp(vcpu), |now| *now == (min, min))?;
            slowest = slowest.max(killed.elapsed());
            ensure!(back == (min, min), "it stays at {back:?}");
        }
        Ok(slowest)
    }

    fn options(&self, bound: &str, khz: u32, lasts: &str) -> Vec<String> {
        let (pid, vcpu, khz) = (self.vm.program(), self.vcpu, khz.to_string());
        let (pid, vcpu) = (pid.to_string(), vcpu.to_string());
        let words = ["tune", &pid, "--vcpu", &vcpu, bound, &khz, "--for", lasts];
        words.map(str::to_owned).into()
    }

    /// One whose floor or ceiling is in force.
    fn client(&self, bound: &str, khz: u32) -> Result<Client> {
        Client::start(&self.options(bound, khz, "60s"))
    }

    fn tunings(&self) -> Result<Vec<Value>> {
        let stats = stats::of(&self.vm)?;
        let tunings = stats["tunings"].as_array();
        tunings.cloned().context("no tunings in the stats")
    }

    fn check(&mut self, what: &str, right: bool) {
        if !right {
            self.wrong.push(json!({ "what": what }));
        }
    }

    /// Stats name what is in force, and whose it is.
    fn shown(&mut self, client: &Client, bound: &str, khz: u32) -> Result<()> {
        let tunings = self.tunings()?;
        let named = tunings.len() == 1
            && tunings[0][bound] == khz
            && tunings[0]["user"] == 0
            && tunings[0]["client"] == client.child.id();
        let metric = format!("handle=\"{}\",bound=\"floor\",user=\"0\"", client.handle);
        let has_metric = stats::openmetrics()?.contains(&metric);
        if !named || !has_metric {
            self.wrong
                .push(json!({ "stats": tunings, "metric": has_metric }));
        }
        Ok(())
    }

    /// The vCPU's clamp is that of `khz`.
    fn has(&mut self, what: &str, khz: u32) -> Result<()> {
        let util = self.policy.util(khz);
        let clamp = self.vm.settled_clamp(self.vcpu, (util, util))?;
        if clamp != (util, util) {
            self.wrong
                .push(json!({ "what": what, "clamp": clamp, "expected": util }));
        }
        Ok(())
    }

    /// And so is the frequency of its pCPU.
    fn runs_at(&mut self, what: &str, khz: u32) -> Result<()> {
        self.has(what, khz)?;
        let runs_at = host_runs_at(self.policy, &mut self.vm, khz)?;
        if runs_at != khz {
            self.wrong
                .push(json!({ "what": what, "runs_at_khz": runs_at, "expected": khz }));
        }
        Ok(())
    }
}

/// A running `vcpufreq tune`.
struct Client {
    child: Child,
    handle: String,
    _output: BufReader<ChildStdout>,
}

impl Client {
    fn start(words: &[String]) -> Result<Self> {
        let mut command = Command::new("/bin/vcpufreq");
        let mut child = command.args(words).stdout(Stdio::piped()).spawn()?;
        let mut output = BufReader::new(child.stdout.take().context("no output")?);
        let mut handle = String::new();
        output.read_line(&mut handle)?;
        ensure!(!handle.trim().is_empty(), "no handle");
        Ok(Self {
            child,
            handle: handle.trim().to_owned(),
            _output: output,
        })
    }

    /// By SIGKILL.
    fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

fn tune<T: AsRef<std::ffi::OsStr>>(words: &[T]) -> Result<Output> {
    Ok(Command::new("/bin/vcpufreq").args(words).output()?)
}

fn tune_as(words: &[String], user: u32) -> Result<Output> {
    let mut command = Command::new("/bin/vcpufreq");
    Ok(command.args(words).uid(user).output()?)
}
