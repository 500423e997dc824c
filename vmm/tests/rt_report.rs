// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of `vcpufreq rt report` on the command line, with shell scripts in the place of the
//! programs that measure: a verdict on hardware and none elsewhere, the requested loads, guests
//! measured through their shell, also if that is lost, files that have each part, and failures of one
//! line. And of `vcpufreq rt compare`.

mod scripts;

use std::{
    fs,
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use scripts::write_script;
use serde_json::Value;
use tempfile::TempDir;

const CYCLICTEST: &str = "#!/bin/sh
echo cyclictest $* >> LOG
WAIT
printf '# Histogram\\n000005 000990\\n000040 000010\\n# Min Latencies: 00005\\n'
printf '# Avg Latencies: 00005\\n# Max Latencies: 00040\\n# Histogram Overflows: 00000\\n'
";
const LOAD: &str = "#!/bin/sh
echo NAME $* >> LOG
exec sleep 1000
";

/// In test RUN, until LOADS loads have logged that they run; ten minutes at most, which is a hang.
const WAIT: &str = "turns=0
while [ $(grep -c ^cyclictest LOG) -eq RUN ] && [ $(grep -c ^stress-ng LOG) -lt LOADS ] &&
    [ $turns -lt 60000 ]; do
    turns=$((turns + 1))
    sleep 0.01
done
";
/// A load that ends at once.
const ENDS: &str = "#!/bin/sh
echo $$ >> LOG
exit 1
";
/// In the place of the pause after which loads are looked at: until three have ended, which are
/// zombies then, or gone.
const SLEEP: &str = "#!/bin/sh
until [ $(grep -c . LOG) -eq 3 ]; do /bin/sleep 0.01; done
for pid in $(cat LOG); do
    while grep -qs '^State:.[^Z]' /proc/$pid/status; do /bin/sleep 0.01; done
done
";

/// A host, and programs to measure it with.
struct Bench(TempDir);

impl Bench {
    fn new(board: &str) -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        let bench = Self(dir);
        bench.write("sys/devices/system/cpu/online", "0-3\n");
        bench.write("proc/sys/kernel/random/boot_id", "boot-1\n");
        bench.write("proc/device-tree/compatible", board);
        bench.program("cyclictest", &CYCLICTEST.replace("WAIT", ""));
        bench.program("stress-ng", LOAD);
        bench.program("hackbench", LOAD);
        bench
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, text).expect("a file");
    }

    fn program(&self, name: &str, script: &str) {
        let log = self.path().join("log").display().to_string();
        let bin = self.path().join("bin");
        fs::create_dir_all(&bin).expect("a folder");
        let script = script.replace("LOG", &log).replace("NAME", name);
        write_script(&bin.join(name), &script);
    }

    /// Has test number `run`, from 1, go on until `loads` loads run.
    fn wait_for_loads(&self, run: u32, loads: u32) {
        let wait = WAIT.replace("RUN", &run.to_string());
        let wait = wait.replace("LOADS", &loads.to_string());
        self.program("cyclictest", &CYCLICTEST.replace("WAIT", &wait));
    }

    /// The report with these words on its command line.
    fn report(&self, line: &str) -> Output {
        let child = self.start(line);
        child.wait_with_output().expect("its output")
    }

    fn start(&self, line: &str) -> Child {
        let path = std::env::var("PATH").expect("PATH");
        let own = self.path().join("bin");
        // A shell that runs the tests in the background has them ignore an interrupt.
        let mut command = Command::new("env");
        command
            .args(["--default-signal=INT", env!("CARGO_BIN_EXE_vcpufreq")])
            .args(["rt", "report", "--root"])
            .arg(self.path())
            .args(line.split_whitespace())
            .env("PATH", format!("{}:{path}", own.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().expect("the program starts")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path().join("log")).expect("the programs' log")
    }
}

/// CPU 3 is measured, and the others loaded.
fn with(more: &str) -> String {
    format!("--cpus 3 --others 0-2 {more}")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_budget_gets_a_verdict_on_hardware_alone() {
    for (board, budget, code, said) in [
        ("qcom,qcs6490", "40", 0, "kept: no latency was above"),
        (
            "qcom,qcs6490",
            "39",
            1,
            "exceeded: the longest latency was 40 µs",
        ),
        (
            "linux,dummy-virt",
            "39",
            0,
            "no verdict on the budget of 39 µs",
        ),
    ] {
        let bench = Bench::new(board);
        // Whatever this machine is: the processor's own word isn't in the tree.
        let line = format!("--loads idle --loops 1000 --budget-us {budget}");
        let output = bench.report(&with(&line));
        let text = stdout(&output);
        assert_eq!(output.status.code(), Some(code), "{board}: {text}");
        assert!(text.contains(said), "{board}: {text}");
        let marked = text.contains("(emulated)");
        assert_eq!(marked, board == "linux,dummy-virt", "{text}");
    }
}

#[test]
fn loads_are_beside_and_figures_complete() {
    let bench = Bench::new("qcom,qcs6490");
    bench.wait_for_loads(2, 3);
    let line = "--loads idle,stress --load-percent 40 --loops 1000 --json";
    let output = bench.report(&with(line));
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let runs = report["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 2);
    let latency = &runs[1]["latencies"][0];
    assert_eq!(
        (&runs[1]["load"], &latency["samples"]),
        (&"stress".into(), &1000.into())
    );
    assert_eq!(
        (&latency["max_us"], &latency["p9999_us"]),
        (&40.into(), &40.into())
    );
    let log = bench.log();
    assert_eq!(
        log.matches("stress-ng --quiet --cpu 1 --cpu-load 40 --taskset")
            .count(),
        3
    );
    assert!(
        log.contains("-a 3 -t 1 -p 90 -i 1000 -l 1000 -h 400 --mainaffinity 2"),
        "{log}"
    );
}

#[test]
fn a_guest_is_measured_through_its_shell() {
    let bench = Bench::new("qcom,qcs6490");
    bench.wait_for_loads(1, 4);
    let guest = "--guest-shell sh --guest-cpus 1 --guest-others 0 --guest-only";
    let output = bench.report(&with(&format!(
        "{guest} --loads stress --loops 1000 --json"
    )));
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let runs = report["runs"].as_array().expect("runs");
    assert_eq!((runs.len(), &runs[0]["place"]), (1, &"guest".into()));
    assert_eq!(runs[0]["latencies"][0]["cpu"], 1);
    // On the host's three and the guest's one.
    let log = bench.log();
    assert_eq!(log.matches("stress-ng").count(), 4, "{log}");
    assert!(
        log.contains("cyclictest -q -m --default-system -a 1 "),
        "{log}"
    );
}

#[test]
fn a_cap_that_comes_during_a_test_marks_its_run() {
    let bench = Bench::new("qcom,qcs6490");
    let policy = "sys/devices/system/cpu/cpufreq/policy2";
    for (name, text) in [
        ("affected_cpus", "2 3\n"),
        ("cpuinfo_max_freq", "2800000\n"),
        ("scaling_max_freq", "2800000\n"),
    ] {
        bench.write(&format!("{policy}/{name}"), text);
    }
    let report = |more: &str| bench.report(&with(&format!("--loads idle --loops 1000 {more}")));
    assert!(!stdout(&report("")).contains("capped"));
    let file = bench.path().join(policy).join("scaling_max_freq");
    let caps = format!("#!/bin/sh\necho 1400000 > {}\n", file.display());
    let script = CYCLICTEST.replace("WAIT", "").replace("#!/bin/sh\n", &caps);
    bench.program("cyclictest", &script);
    let output = report("--json");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let run = &report["runs"][0];
    let cap = &run["caps"][0];
    assert_eq!(
        (&cap["khz"], &run["throttled"]),
        (&1_400_000.into(), &0.into())
    );
    assert_eq!(cap["by"][0], "scaling_max_freq");
}

#[test]
fn what_can_not_be_is_one_line() {
    for (line, said) in [
        ("--cpus 3 --others 2-3", "would be measured and loaded"),
        ("--cpus 3", "name --cpus and --others"),
        ("--cpus 9 --others 0", "CPU 9 isn't online"),
        ("--cpus 3 --others 0 --time 0s", "10s, 30m or 24h"),
        ("--cpus 3 --others 0 --time=", "10s, 30m or 24h"),
        (
            "--cpus 3 --others 0 --budget-us 18446744073709551615",
            "60000000",
        ),
        (
            "--cpus 3 --others 0 --loads full",
            "idle, stress, hackbench or net",
        ),
        (
            "--cpus 3 --others 0 --loads net",
            "name one that answers with --net-to",
        ),
        (
            "--cpus 3 --others 0 --loads net --net-to host",
            "invalid IP address",
        ),
        (
            "--cpus 3 --others 0 --stress-fifo 1 --load-percent 91",
            "--load-percent 90 at most",
        ),
        (
            "--cpus 3 --others 0 --loads idle --net-to ::1",
            "--net-to is for the load net",
        ),
        (
            "--cpus 3 --others 0 --loads idle --stress-fifo 1",
            "--stress-fifo is for the load stress",
        ),
        (
            "--cpus 3 --others 0 --out /dev/stdout",
            "/dev/stdout is no regular file",
        ),
        (
            "--cpus 3 --others 0 --html /dev/null",
            "/dev/null is no regular file",
        ),
        (
            "--cpus 3 --others 0 --out /tmp/report --html /tmp/./report",
            "/tmp/./report is named twice",
        ),
        (
            "--cpus 3 --others 0 --out /no-such/report.json",
            "can't write /no-such/report.json",
        ),
        (
            "--cpus 3 --others 0 --guest-shell sh --guest-cpus 0-1",
            "have to be as many",
        ),
        (
            "--cpus 3 --others 0 --guest-shell no-such --guest-cpus 1",
            "can't start no-such",
        ),
    ] {
        let output = Bench::new("qcom,qcs6490").report(line);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{line:?}: {errors}");
        assert!(errors.contains(said), "{said}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
}

#[test]
fn a_test_that_was_cut_short_has_no_verdict() {
    let bench = Bench::new("qcom,qcs6490");
    let output = bench.report(&with("--loads idle --loops 1001 --budget-us 90"));
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("no verdict") && text.contains("1000 wake-ups of 1001"),
        "{text}"
    );
}

/// Prints its pid, and goes on for long.
const LASTS: &str = "#!/bin/sh
echo $$ >> LOG
exec sleep 1000
";

#[test]
fn a_report_that_is_ended_leaves_nothing_running() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGKILL] {
        let bench = Bench::new("qcom,qcs6490");
        bench.program("cyclictest", LASTS);
        bench.program("stress-ng", LASTS);
        let mut child = bench.start(&with("--loads stress"));
        let log = bench.path().join("log");
        let pids = || fs::read_to_string(&log).unwrap_or_default();
        // Three loads, and the test beside them.
        while pids().lines().count() < 4 {
            assert!(child.try_wait().expect("its state").is_none(), "it ended");
            std::thread::yield_now();
        }
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process"));
        kill(pid, signal).expect("it runs");
        let output = child.wait_with_output().expect("its output");
        if signal != Signal::SIGKILL {
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{errors}");
            assert!(errors.contains("ended by signal"), "{errors}");
        }
        for pid in pids().lines() {
            let stat = format!("/proc/{pid}/stat");
            // Gone, or a zombie of the process that takes orphans.
            while fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z")) {
                std::thread::yield_now();
            }
        }
    }
}

#[test]
fn a_test_that_fails_is_no_figure() {
    let bench = Bench::new("qcom,qcs6490");
    bench.program(
        "cyclictest",
        "#!/bin/sh\necho 'unable to lock' >&2\nexit 1\n",
    );
    let output = bench.report(&with("--loads idle"));
    assert_eq!(output.status.code(), Some(2));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("unable to lock"), "{errors}");
    bench.program("stress-ng", ENDS);
    bench.program("sleep", SLEEP);
    let output = bench.report(&with("--loads stress"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("the load ended at once"), "{errors}");
}

/// What a report wrote into a file.
fn written(bench: &Bench, name: &str) -> Value {
    let text = fs::read_to_string(bench.path().join(name)).expect("the report's file");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn a_flood_goes_to_an_address_that_answers() {
    let bench = Bench::new("qcom,qcs6490");
    let line = with("--loads net --net-to 192.0.2.1 --loops 1000");
    bench.program("ping", "#!/bin/sh\nexit 1\n");
    let output = bench.report(&line);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("192.0.2.1 does not answer"), "{errors}");
    // The flood lasts, the one that looks whether there is an answer doesn't.
    let ping = "#!/bin/sh\n[ \"$2\" = -f ] || exit 0\necho ping $* >> LOG\nexec sleep 1000\n";
    bench.program("ping", ping);
    let output = bench.report(&line);
    assert!(output.status.success(), "{output:?}");
    let log = bench.log();
    assert!(log.contains("ping -q -f -w 61 192.0.2.1"), "{log}");
}

#[test]
fn the_files_have_each_part() {
    let bench = Bench::new("qcom,qcs6490");
    let [json, html] = ["report.json", "report.html"].map(|name| bench.path().join(name));
    let files = format!("--out {} --html {}", json.display(), html.display());
    let line = with(&format!("--loads idle --loops 2000 --part 1s {files}"));
    for (name, text) in [
        ("affected_cpus", "2 3\n"),
        ("cpuinfo_max_freq", "2800000\n"),
        ("scaling_max_freq", "1400000\n"),
    ] {
        let policy = "sys/devices/system/cpu/cpufreq/policy2";
        bench.write(&format!("{policy}/{name}"), text);
    }
    let output = bench.report(&line);
    assert!(output.status.success(), "{output:?}");
    let whole = written(&bench, "report.json");
    let run = &whole["runs"][0];
    assert_eq!(run["latencies"][0]["samples"], 2000);
    assert_eq!(
        (&whole["verdict"], &run["due"][0]),
        (&"none".into(), &2000.into())
    );
    let log = bench.log();
    assert_eq!(log.matches(" -l 1000 ").count(), 2, "{log}");
    let page = fs::read_to_string(&html).expect("the page");
    assert!(
        page.contains("<svg") && page.contains("<td>2000</td>"),
        "{page}"
    );
    // The second part fails: the first one stays.
    let fails = "#!/bin/sh\necho cyclictest $* >> LOG\n[ $(grep -c . LOG) -lt 4 ] || exit 1\n";
    let script = CYCLICTEST.replace("WAIT\n", "");
    let script = script.split_once("LOG\n").expect("its end").1;
    bench.program("cyclictest", &format!("{fails}{script}"));
    assert_eq!(bench.report(&line).status.code(), Some(2));
    let half = written(&bench, "report.json");
    assert_eq!(half["runs"][0]["latencies"][0]["samples"], 1000);
    assert_eq!(half["verdict"], "incomplete");
    assert_eq!(half["runs"][0]["caps"][0]["khz"], 1_400_000);
    // Nothing is measured: what was there stays.
    bench.program("stress-ng", ENDS);
    let output = bench.report(&with(&format!("--loads stress --loops 2000 {files}")));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(written(&bench, "report.json"), half);
}

#[test]
fn a_guest_needs_the_programs_of_its_own_loads() {
    let bench = Bench::new("qcom,qcs6490");
    let guest = bench.path().join("guest");
    fs::create_dir(&guest).expect("a folder");
    let shell = format!(
        "#!/bin/sh\nPATH={}:/usr/bin:/bin exec sh\n",
        guest.display()
    );
    bench.program("guest-shell", &shell);
    let line =
        "--guest-shell guest-shell --guest-cpus 1 --guest-only --loads hackbench --loops 1000";
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let output = bench.report(&with(line));
    assert!(
        said(&output).contains("there is no cyclictest"),
        "{output:?}"
    );
    write_script(
        &guest.join("cyclictest"),
        &CYCLICTEST.replace("LOG", "/dev/null").replace("WAIT", ""),
    );
    let output = bench.report(&with(line));
    assert!(output.status.success(), "{output:?}");
    let output = bench.report(&with(&format!("{line} --guest-others 0")));
    assert!(
        said(&output).contains("there is no hackbench"),
        "{output:?}"
    );
}

#[test]
fn a_lost_guest_shell_costs_one_part() {
    let bench = Bench::new("qcom,qcs6490");
    // It looks for programs, has the first part, is lost twice, and is there again.
    let shell = "#!/bin/sh\necho shell >> LOG\ncase $(grep -c shell LOG) in 3 | 4) exit 255 ;; esac\nexec sh\n";
    bench.program("guest-shell", shell);
    let guest = "--guest-shell guest-shell --guest-cpus 1 --guest-only";
    let line = format!("{guest} --loads idle --loops 2000 --part 1s --json");
    let output = bench.report(&with(&line));
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("the guest's shell was lost"), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let run = &report["runs"][0];
    assert_eq!(
        (&run["latencies"][0]["samples"], &run["losses"]),
        (&2000.into(), &1.into())
    );
}

#[test]
fn single_latencies_are_recorded() {
    let bench = Bench::new("qcom,qcs6490");
    let spike = "printf 'T: 0 Spike:      40: TS:   1234567890\\nspikes = 1\\n'\n";
    let script = CYCLICTEST.replace("WAIT\n", spike);
    bench.program("cyclictest", &script);
    let line = with("--loads idle --loops 1000 --spike-us 30");
    let text = stdout(&bench.report(&line));
    let said = "host, idle: 1 above 30 µs: 40 µs on CPU 3 at 1234.567890 s\n";
    assert!(text.contains(said), "{text}");
    assert!(bench.log().contains(" --spike=30 "), "{}", bench.log());
}

#[test]
fn worse_is_beyond_the_draws_spread() {
    let bench = Bench::new("qcom,qcs6490");
    let report = |name: &str, max: &str| {
        let script = CYCLICTEST.replace("WAIT", "").replace("00040", max);
        bench.program("cyclictest", &script);
        let out = bench.path().join(name).display().to_string();
        let line = format!("--loads idle --loops 1000 --draws 2 --out {out}");
        let output = bench.report(&with(&line));
        assert!(output.status.success(), "{output:?}");
        out
    };
    let (first, second) = (report("a.json", "00040"), report("b.json", "00090"));
    let html = bench.path().join("both.html").display().to_string();
    let compare = |files: [&str; 2], more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_vcpufreq"))
            .args(["rt", "compare"])
            .args(files)
            .args(more)
            .output();
        output.expect("the program starts")
    };
    for (files, code, said) in [
        ([&*first, &*second], 1, "worse: a latency became longer"),
        ([&*second, &*first], 0, "no latency became longer"),
        ([&*first, &*first], 0, "no latency became longer"),
    ] {
        let output = compare(files, &["--html", &html]);
        let text = stdout(&output);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(said), "{text}");
    }
    let page = fs::read_to_string(&html).expect("the page");
    assert!(page.contains(", run 2</h3>"), "{page}");
    let json = compare([&first, &second], &["--json"]).stdout;
    let json: Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(json["verdict"], "worse");
    let before = written(&bench, "a.json");
    let output = compare([&first, &second], &["--html", &first]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(written(&bench, "a.json"), before);
    let none = bench.path().join("none.json").display().to_string();
    for (file, text, said) in [
        ("empty.json", "{}", "is no report"),
        (
            "other.json",
            "{\"conditions\": {}, \"runs\": []}",
            "have no complete test of the same place",
        ),
    ] {
        bench.write(file, text);
        let file = bench.path().join(file).display().to_string();
        let output = compare([&first, &file], &[]);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(
            errors.contains(said) && errors.lines().count() == 1,
            "{errors}"
        );
    }
    assert_eq!(compare([&first, &none], &[]).status.code(), Some(2));
}
