// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: irqbalance is told by its socket to keep off the real-time CPUs, beside those that it
//! keeps off already; it has its own list again after a restore, wherever apply or restore was
//! killed; another instance is told nothing; one that can't be asked has to be told by hand.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    thread::JoinHandle,
};

use vcpufreq_rt::{
    Applied, CpuList, Effect, Finding, Look as _, Partition, Plan, Profile, Restored, apply, check,
    is_ready, plan, restore,
};

use crate::{fake::FakeKernel, partition::guest};

const LIST: &str = "irqbalance's ban list (process 900)";
const SOCKET: &str = "/run/irqbalance/irqbalance900.sock";
const END: &str = "end";
/// Answers with what was in force, between being told and heeding it.
const LATE: u32 = 2;

type End = Box<dyn FnOnce() + Send>;

/// What `sock_handle()` and `setup_banned_cpus()` of irqbalance 1.9.5 keep.
#[derive(Default)]
struct State {
    /// From the environment.
    own: CpuList,
    /// `banned_cpumask_from_ui`.
    told: Option<String>,
    /// `banned_cpus`.
    in_force: CpuList,
    /// Answers until the next scan; none is due at 0.
    scan_in: u32,
    /// A sender other than root.
    refuses: bool,
    /// It doesn't scan any more.
    stuck: bool,
    /// Its end, by another client, in the place of its next answer to this.
    ends: Option<(&'static str, End)>,
    settings: Vec<String>,
}

impl State {
    fn scan(&mut self) {
        let told = self.told.as_ref().map(|list| list.parse().unwrap());
        self.in_force = told.unwrap_or(self.own.clone());
        self.scan_in = 0;
    }

    fn answer(&mut self, message: &str) -> String {
        if self.refuses {
            return String::new();
        }
        if let Some(list) = message.strip_prefix("settings cpus ") {
            // 1.7 and 1.8 read on behind its end.
            let list = format!("{list}9");
            let list = list.split(' ').find(|word| !word.is_empty());
            let list = list.filter(|list| !list.starts_with("NULL"));
            self.told = list.map(str::to_owned);
            self.scan_in = LATE;
            self.settings.push(message.to_owned());
        }
        if !message.starts_with("setup") {
            return String::new();
        }
        let mask = format!("{:0>8}", self.in_force.mask());
        match self.scan_in {
            _ if self.stuck => {}
            0 => {}
            1 => self.scan(),
            _ => self.scan_in -= 1,
        }
        format!("SLEEP 1 IRQ 7 LOAD 0 DIFF 0 CLASS 0 BANNED {mask}")
    }
}

/// Process 900 of a fake host, until dropped.
pub struct Irqbalance {
    state: Arc<Mutex<State>>,
    socket: PathBuf,
    serves: Option<JoinHandle<()>>,
}

impl Irqbalance {
    /// With this list in its environment.
    pub fn start(host: &FakeKernel, own: &str) -> Self {
        host.thread(900, "irqbalance", 0, 0);
        let environ = match own {
            "" => "PATH=/bin\0".to_owned(),
            own => format!("PATH=/bin\0IRQBALANCE_BANNED_CPULIST={own}\0"),
        };
        host.put("/proc/900/environ", &environ);
        host.put("/run/irqbalance/beside", "");
        let own: CpuList = own.parse().unwrap();
        let state = Arc::new(Mutex::new(State {
            own: own.clone(),
            in_force: own,
            ..State::default()
        }));
        let socket = host.real(SOCKET);
        let listener = UnixListener::bind(&socket).unwrap();
        let shared = state.clone();
        let serves = std::thread::spawn(move || serve(&listener, &shared));
        Self {
            state,
            socket,
            serves: Some(serves),
        }
    }

    /// What it was told.
    pub fn settings(&self) -> usize {
        self.state().settings.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// As irqbalance-ui does.
    fn told_by_hand(&self, list: &str) {
        let mut state = self.state();
        state.told = Some(list.to_owned());
        state.scan();
    }

    /// After its next scan: what it was told, and what is in force.
    fn at_last(&self) -> (Option<String>, String) {
        let mut state = self.state();
        state.scan();
        (state.told.clone(), state.in_force.to_string())
    }
}

impl Drop for Irqbalance {
    fn drop(&mut self) {
        // Not there while a test fails.
        let Ok(mut stream) = UnixStream::connect(&self.socket) else {
            return;
        };
        stream.write_all(END.as_bytes()).unwrap();
        self.serves.take().unwrap().join().unwrap();
        std::fs::remove_file(&self.socket).unwrap();
    }
}

/// One message a connection, as one recvmsg() takes it.
fn serve(listener: &UnixListener, state: &Mutex<State>) {
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut message = [0; 16384];
        let length = stream.read(&mut message).unwrap();
        let message = str::from_utf8(&message[..length]).unwrap();
        if message == END {
            return;
        }
        let ends = state
            .lock()
            .unwrap()
            .ends
            .take_if(|(at, _)| message.starts_with(*at));
        if let Some((_, ends)) = ends {
            ends();
            continue;
        }
        let answer = state.lock().unwrap().answer(message);
        stream.write_all(answer.as_bytes()).unwrap();
    }
}

fn planned(host: &FakeKernel) -> (Plan, Profile) {
    let profile = Profile::parse("test", "settings.interrupts = 'housekeeping'").unwrap();
    let partition = Partition::new(host, vec![guest("plc", "3")], None, None).unwrap();
    (plan(host, &partition, &profile), profile)
}

fn try_apply(host: &FakeKernel) -> Option<Applied> {
    let (plan, profile) = planned(host);
    apply(host, &plan, ("test", &profile), &mut |_, _, _| {}).ok()
}

fn by_hand(plan: &Plan) -> bool {
    let told = |finding: &Finding| matches!(finding, Finding::Hand(text) if text.contains("IRQBALANCE_BANNED_CPULIST=3"));
    plan.findings.iter().any(told)
}

fn left(host: &FakeKernel) -> Vec<(String, String)> {
    match restore(host, &mut |_, _, _| {}).unwrap() {
        Restored::Done { left, .. } => left,
        other => panic!("{other:?}"),
    }
}

/// Its environment's list, what it was told, what it is told, what it was told after a restore.
const LISTS: [(&str, Option<&str>, &str); 4] = [
    ("", None, "3"),
    ("0", None, "0,3"),
    ("", Some("0-1"), "0-1,3"),
    ("0", Some("1"), "1,3"),
];

#[test]
fn it_keeps_off_these_cpus_and_has_its_list_back() {
    for (own, told, all) in LISTS {
        let host = FakeKernel::four();
        let it = Irqbalance::start(&host, own);
        if let Some(told) = told {
            it.told_by_hand(told);
        }
        let before = it.at_last();
        let (planned, profile) = planned(&host);
        assert!(!by_hand(&planned));
        let mut lines = Vec::new();
        let applied = apply(
            &host,
            &planned,
            ("test", &profile),
            &mut |name, old, new| {
                lines.push(format!("{name}: {old} → {new}"));
            },
        );
        assert_eq!(applied.unwrap().refused, []);
        let old = told.unwrap_or(if own.is_empty() { "none" } else { own });
        assert_eq!(
            lines[0],
            format!("{LIST}: {old} → {all}"),
            "before the interrupts"
        );
        assert_eq!(
            it.state().in_force.to_string(),
            all,
            "in force when apply ends"
        );
        let (planned, profile) = self::planned(&host);
        let checked = check(&host, &planned, &profile);
        let one = checked.iter().find(|one| one.name == "irqbalance").unwrap();
        assert!(one.is_good() && one.of == 1, "{one:?}");
        assert_eq!(left(&host), []);
        assert_eq!(
            it.state().in_force.to_string(),
            before.1,
            "in force when restore ends"
        );
        assert_eq!(it.at_last(), before, "{own} {told:?}");
    }
}

#[test]
fn one_that_keeps_off_already_is_told_nothing() {
    let host = FakeKernel::four();
    let it = Irqbalance::start(&host, "2-3");
    try_apply(&host).unwrap();
    restore(&host, &mut |_, _, _| {}).unwrap();
    assert!(it.state().settings.is_empty());
}

#[test]
fn check_says_what_it_does_not_keep_off() {
    let host = FakeKernel::four();
    let it = Irqbalance::start(&host, "");
    try_apply(&host).unwrap();
    let ready = || {
        let (plan, profile) = planned(&host);
        let checked = check(&host, &plan, &profile);
        let one = checked.into_iter().find(|one| one.name == "irqbalance");
        (is_ready(&plan, one.as_slice()), one.unwrap())
    };
    assert!(ready().0);
    it.told_by_hand("2");
    let (ready, one) = ready();
    assert_eq!(one.unset, [(LIST.into(), "2".into(), "2-3".into())]);
    assert!(!ready && one.effect == Effect::Not("it is not set".into()));
}

/// Kills apply, or restore, at each of its steps, before and after the step; then restores.
fn killed_everywhere(own: &str, told: Option<&str>, of_restore: bool) -> u32 {
    let mut kills = 0;
    for happens in [false, true] {
        for step in 0.. {
            let host = FakeKernel::four();
            let it = Irqbalance::start(&host, own);
            if let Some(told) = told {
                it.told_by_hand(told);
            }
            let before = it.at_last();
            if of_restore {
                try_apply(&host).unwrap();
            }
            host.die_at(step, happens);
            if of_restore {
                drop(restore(&host, &mut |_, _, _| {}));
            } else {
                try_apply(&host);
            }
            let all_done = host.steps.get() <= step;
            host.revive();
            restore(&host, &mut |_, _, _| {}).unwrap();
            assert!(!host.real(vcpufreq_rt::PATH).exists());
            assert_eq!(it.at_last(), before, "killed at {step}, {happens}");
            if all_done {
                break;
            }
            kills += 1;
        }
    }
    kills
}

#[test]
fn apply_and_restore_killed_at_each_step() {
    for (own, told, _) in [LISTS[0], LISTS[3]] {
        for of_restore in [false, true] {
            let kills = killed_everywhere(own, told, of_restore);
            assert!(kills >= 8, "{kills}");
        }
    }
}

#[test]
fn another_instance_is_told_nothing() {
    let host = FakeKernel::four();
    drop({
        let it = Irqbalance::start(&host, "");
        try_apply(&host).unwrap();
        it
    });
    let next = Irqbalance::start(&host, "");
    // As before, but started later: field 22.
    let stat = "900 (irqbalance) S ".to_owned() + &"0 ".repeat(18) + "77 " + &"0 ".repeat(20);
    host.put("/proc/900/stat", &stat);
    let restored = restore(&host, &mut |_, _, _| {}).unwrap();
    let Restored::Done { gone, left, .. } = restored else {
        panic!("{restored:?}");
    };
    assert_eq!((gone, left), (vec![LIST.to_owned()], vec![]));
    assert!(next.state().settings.is_empty());
    assert!(!host.real(vcpufreq_rt::PATH).exists());
}

#[test]
fn one_that_has_ended_is_gone_before_its_parent_sees_it() {
    let host = FakeKernel::four();
    let it = Irqbalance::start(&host, "");
    try_apply(&host).unwrap();
    drop(it);
    let stat = host.read("/proc/900/stat").unwrap();
    host.put("/proc/900/stat", &stat.replacen(" S ", " Z ", 1));
    // A zombie has none any more.
    host.put("/proc/900/environ", "");
    let restored = restore(&host, &mut |_, _, _| {}).unwrap();
    let Restored::Done { gone, left, .. } = restored else {
        panic!("{restored:?}");
    };
    assert_eq!((gone, left), (vec![LIST.to_owned()], vec![]));
    let (plan, _) = planned(&host);
    assert!(!by_hand(&plan) && plan.changes().all(|(name, _)| name != "irqbalance"));
}

/// As the kernel has it: PF_EXITING in field 9 comes before its sockets are closed, state Z after.
fn ending(host: &FakeKernel) -> End {
    let stat = host.real("/proc/900/stat");
    let environ = host.real("/proc/900/environ");
    let runs = fs::read_to_string(&stat).unwrap();
    let ends = runs.replacen(" S 0 0 0 0 0 0 ", " R 0 0 0 0 0 4 ", 1);
    assert_ne!(runs, ends);
    Box::new(move || {
        fs::write(&stat, ends).unwrap();
        fs::write(&environ, "").unwrap();
    })
}

#[test]
fn one_that_ends_before_it_answers_is_gone() {
    let host = FakeKernel::four();
    let it = Irqbalance::start(&host, "");
    it.state().ends = Some(("setup", ending(&host)));
    let (plan, _) = planned(&host);
    assert!(!by_hand(&plan) && plan.changes().all(|(name, _)| name != "irqbalance"));
}

#[test]
fn one_that_ends_when_it_is_told_is_gone() {
    for applied in [false, true] {
        let host = FakeKernel::four();
        // Nothing else is brought back: what was refused isn't tried again.
        host.remove("/proc/irq");
        let it = Irqbalance::start(&host, "");
        assert_eq!(try_apply(&host).unwrap().made, 1);
        if !applied {
            // Its list is as before already.
            it.told_by_hand("");
        }
        it.state().ends = Some(("settings", ending(&host)));
        let restored = restore(&host, &mut |_, _, _| {}).unwrap();
        let Restored::Done { gone, left, .. } = restored else {
            panic!("{restored:?}");
        };
        assert_eq!((gone, left), (vec![LIST.to_owned()], vec![]), "{applied}");
    }
}

#[test]
fn one_that_ends_its_conversation_has_to_be_told_by_hand() {
    let host = FakeKernel::four();
    let it = Irqbalance::start(&host, "");
    it.state().refuses = true;
    let (refused, _) = planned(&host);
    let has = |plan: &Plan| plan.changes().any(|(name, _)| name == "irqbalance");
    assert!(by_hand(&refused) && !has(&refused));
    it.state().refuses = false;
    let (heard, _) = planned(&host);
    assert!(!by_hand(&heard) && has(&heard));
    drop(it);
    let (no_socket, _) = planned(&host);
    assert!(by_hand(&no_socket) && !has(&no_socket));
}

#[test]
fn a_list_that_can_not_be_given_back_stays_on_the_record() {
    let host = FakeKernel::four();
    let it = Irqbalance::start(&host, "");
    try_apply(&host).unwrap();
    it.state().refuses = true;
    let (name, why) = left(&host).remove(0);
    assert!(name == LIST && why.contains("restart it"), "{why}");
    it.state().refuses = false;
    let away = it.socket.with_extension("away");
    std::fs::rename(&it.socket, &away).unwrap();
    assert_eq!(left(&host).len(), 1, "it runs, its list isn't gone");
    std::fs::rename(away, &it.socket).unwrap();
    host.refuse(SOCKET);
    assert_eq!(left(&host).len(), 1);
    host.relent();
    assert_eq!(left(&host), []);
    assert_eq!(it.at_last(), (None, String::new()));
}

#[test]
fn one_that_never_takes_it_is_told_as_refusing() {
    let host = FakeKernel::four();
    let it = Irqbalance::start(&host, "");
    it.state().stuck = true;
    // All else is set: it is waited for once.
    host.put("/proc/irq/15/smp_affinity", "7");
    host.put("/proc/irq/default_smp_affinity", "7");
    let refused = try_apply(&host).unwrap().refused;
    let [(name, why)] = &refused[..] else {
        panic!("{refused:?}");
    };
    let next = "it still has 'none'; put IRQBALANCE_BANNED_CPULIST=3 into ";
    assert!(name == LIST && why.starts_with(next), "{why}");
}
