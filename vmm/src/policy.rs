// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq policy`: an operator replaces the rule from a running guest's request to a clamp. The VMM's
//! guardian carries it out ([`crate::lifecycle::policies`]).

use std::{
    fs::File,
    io::{
        BufRead as _, BufReader,
        ErrorKind::{BrokenPipe, ConnectionReset},
        Read as _, Write as _,
    },
    path::{Path, PathBuf},
    str::FromStr,
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail, ensure};
use clap::Subcommand;
use serde_json::{Value, json};

use crate::{
    lifecycle::policies::wire::{
        LINE, OBJECT, PolicyAnswer, PolicyReply, PolicyVerb, ShownPolicy, VERSION, is_name,
    },
    lifecycle::state::StateDir,
    message::{print, printable},
    patience::patience,
    stats,
    sys::connect_now,
};

/// How long a guardian may take to answer; it tries a policy in less than a second.
const PATIENCE: Duration = patience(60);

/// What to do with policies.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Have a policy decide about a guest's requests from now on, after a trial
    Load {
        /// Its object, compiled as docs/vcpufreq.md shows
        file: PathBuf,
        /// The VMM's process, as in `vcpufreq stats`, or all that are on the path bpf
        #[arg(long, value_name = "PID|all")]
        vm: PolicyVms,
    },
    /// Print which guest has which policy, since when, and how often it was asked
    Show {
        /// The VMM's process, or all
        #[arg(long, value_name = "PID|all", default_value = "all")]
        vm: PolicyVms,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Have the built-in rule decide again
    Reset {
        /// The VMM's process, or all
        #[arg(long, value_name = "PID|all")]
        vm: PolicyVms,
    },
}

/// Of which VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyVms {
    /// All that can have a policy.
    All,
    /// That of this VMM.
    One(u32),
}

impl FromStr for PolicyVms {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            pid => pid
                .parse()
                .map(Self::One)
                .map_err(|_| format!("'{text}' is no process; write its number, or all")),
        }
    }
}

/// Carries it out; returns the exit code.
///
/// # Errors
/// Why it is not done, and which VMs' policies have changed by then.
pub fn run(command: &PolicyCommand) -> anyhow::Result<u8> {
    let dir = StateDir::of_user()?;
    match command {
        PolicyCommand::Load { file, vm } => load(&dir, file, *vm)?,
        PolicyCommand::Reset { vm } => {
            let pids = vms(&dir, *vm)?;
            call_each(&dir, &pids, (PolicyVerb::Reset, &[]), "the built-in rule")?;
        }
        PolicyCommand::Show { vm, json } => show(&dir, *vm, *json)?,
    }
    Ok(0)
}

fn load(dir: &StateDir, file: &Path, vm: PolicyVms) -> anyhow::Result<()> {
    let name = name_of(file)?;
    let object = read(file)?;
    let bytes = u64::try_from(object.len())?;
    let pids = vms(dir, vm)?;
    let load = |trial| PolicyVerb::Load {
        name: name.clone(),
        bytes,
        trial,
    };
    // What one VM refuses on trial, none gets. A load is a trial too.
    let tried = if pids.len() > 1 { &pids[..] } else { &[] };
    for pid in tried {
        call(dir, *pid, load(true), &object)?;
    }
    call_each(dir, &pids, (load(false), &object), "the new policy")
}

/// Calls one after the other. If one doesn't do it, those before it have `what` and keep it: no
/// guardian gives back what was there before.
fn call_each(
    dir: &StateDir,
    pids: &[u32],
    (verb, object): (PolicyVerb, &[u8]),
    what: &str,
) -> anyhow::Result<()> {
    for (at, pid) in pids.iter().enumerate() {
        let called = call(dir, *pid, verb.clone(), object);
        let Err(error) = called else { continue };
        let done: Vec<_> = pids[..at].iter().map(u32::to_string).collect();
        return Err(match &done[..] {
            [] => error,
            [one] => error.context(format!("process {one} has {what} by now")),
            all => error.context(format!("processes {} have {what} by now", all.join(", "))),
        });
    }
    Ok(())
}

/// The file's name up to its first dot.
fn name_of(file: &Path) -> anyhow::Result<String> {
    let name = file.file_name().and_then(|name| name.to_str());
    let name = name.and_then(|name| name.split('.').next()).unwrap_or("");
    ensure!(
        is_name(name),
        "{}: a policy is named by its file, in less than 32 letters, digits, - and _; rename it",
        file.display()
    );
    Ok(name.to_owned())
}

fn read(file: &Path) -> anyhow::Result<Vec<u8>> {
    let shown = file.display();
    let mut object = Vec::new();
    let opened =
        File::open(file).with_context(|| format!("{shown} can't be read; correct FILE"))?;
    let read = opened.take(OBJECT).read_to_end(&mut object);
    let bytes = read.with_context(|| format!("{shown} can't be read; correct FILE"))?;
    ensure!(
        u64::try_from(bytes)? < OBJECT,
        "{shown} is no policy: it has 1 MiB or more"
    );
    Ok(object)
}

/// The processes that are meant.
fn vms(dir: &StateDir, vms: PolicyVms) -> anyhow::Result<Vec<u32>> {
    if let PolicyVms::One(pid) = vms {
        return Ok(vec![pid]);
    }
    let takes = |pid: &u32| dir.policy_socket(*pid).is_ok_and(|path| path.exists());
    let pids: Vec<_> = stats::running(dir)?.into_iter().filter(takes).collect();
    ensure!(
        !pids.is_empty(),
        "no guest of this user is on the path bpf; start one with vcpufreq run --path bpf"
    );
    Ok(pids)
}

fn call(
    dir: &StateDir,
    pid: u32,
    verb: PolicyVerb,
    object: &[u8],
) -> anyhow::Result<Option<ShownPolicy>> {
    let path = dir.policy_socket(pid)?;
    let stream = connect_now(&path).with_context(|| {
        format!(
            "process {pid} takes no policy: there is no guardian of a guest on the path bpf at {}, or it is busy; try again",
            path.display()
        )
    })?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let sent = (&stream).write_all(verb.line()?.as_bytes());
    let sent = sent.and_then(|()| (&stream).write_all(object));
    let mut line = Vec::new();
    let mut answers = BufReader::new(&stream).take(LINE);
    let read = answers.read_until(b'\n', &mut line);
    if line.is_empty() {
        // What it says before it hangs up counts.
        let why = sent.and(read.map(drop)).err();
        let late = why.filter(|error| !matches!(error.kind(), BrokenPipe | ConnectionReset));
        late.map_or(Ok(()), Err)
            .with_context(|| format!("the guardian of process {pid} doesn't answer; try again"))?;
        bail!("the guardian of process {pid} takes no calls of this user, or has ended");
    }
    match serde_json::from_slice::<PolicyReply>(&line) {
        Ok(PolicyReply { version, reply }) if version == VERSION => match reply {
            PolicyAnswer::InForce(policy) => Ok(policy),
            PolicyAnswer::Error(why) => bail!("process {pid}: {}", printable(&why)),
        },
        _ => bail!(
            "the answer of the guardian of process {pid} can't be read; is it of another version?"
        ),
    }
}

fn show(dir: &StateDir, vm: PolicyVms, json: bool) -> anyhow::Result<()> {
    let pids = match vms(dir, vm) {
        // Nothing is no error here.
        Err(_) if vm == PolicyVms::All => Vec::new(),
        pids => pids?,
    };
    let mut shown = Vec::new();
    for pid in pids {
        shown.push((pid, call(dir, pid, PolicyVerb::Show, &[])?));
    }
    let text = match json {
        true => format!(
            "{:#}\n",
            Value::from_iter(
                shown
                    .iter()
                    .map(|(pid, policy)| { json!({ "pid": pid, "policy": policy }) })
            )
        ),
        false => table(&shown, SystemTime::now()),
    };
    print(text)?;
    Ok(())
}

/// A line for each VM.
fn table(shown: &[(u32, Option<ShownPolicy>)], now: SystemTime) -> String {
    let now = now.duration_since(SystemTime::UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_millis());
    let row = |cells: [&str; 7]| {
        let [pid, policy, hash, age, asked, bounded, silent] = cells;
        format!(
            "{pid:>8} {policy:<16} {hash:<12} {age:>9} {asked:>10} {bounded:>10} {silent:>10}\n"
        )
    };
    let titles = row([
        "PID", "POLICY", "SHA-256", "FOR", "ASKED", "BOUNDED", "SILENT",
    ]);
    let rows = shown.iter().map(|(pid, policy)| {
        let pid = pid.to_string();
        let Some(of) = policy else {
            return row([&pid, "built-in", "-", "-", "-", "-", "-"]);
        };
        let seconds = now.saturating_sub(of.since_unix_ms.into()) / 1000;
        let counts = [of.asked, of.bounded, of.silent].map(|count| count.to_string());
        let hash = printable(of.sha256.get(..12).unwrap_or(""));
        let (name, age) = (printable(&of.name), format!("{seconds} s"));
        row([&pid, &name, &hash, &age, &counts[0], &counts[1], &counts[2]])
    });
    titles + &rows.collect::<String>()
}

#[cfg(test)]
mod tests {
    //! Promises: a policy is named by its file; a VM is a process or all; what one of all refuses on
    //! trial, none gets; a later refusal names the VMs that have the policy; a guardian that hangs up is
    //! no late one; each VM has a line.
    use std::{
        os::{
            fd::AsFd as _,
            unix::{
                net::{UnixListener, UnixStream},
                process::parent_id,
            },
        },
        process::id,
        sync::mpsc::{Receiver, channel},
    };

    use nix::poll::PollFlags;
    use tempfile::TempDir;
    use vcpufreq_host::HostRoot;

    use super::*;
    use crate::{
        lifecycle::record::{VmmRecord, owner_of},
        sys::is_ready,
    };

    /// Whose guardian was called, for what, and with which object.
    type SeenCall = (u32, PolicyVerb, Vec<u8>);

    /// Records of three processes that run, of which two have a guardian that takes calls.
    struct GuardedVms {
        dir: TempDir,
        calls: Receiver<SeenCall>,
    }

    impl GuardedVms {
        /// The guardian of `refusing` refuses each load.
        fn new(refusing: Option<u32>) -> Self {
            Self::that_refuse(move |pid, _| refusing == Some(pid))
        }

        /// A guardian refuses a load, or a trial, where that is so of its process.
        fn that_refuse(refuses: impl Fn(u32, bool) -> bool + Clone + Send + 'static) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let state = StateDir::at(dir.path());
            let (sender, calls) = channel();
            for pid in [id(), parent_id(), 1] {
                let owner = owner_of(&HostRoot::default(), pid).unwrap();
                state.write(&VmmRecord::new(owner)).unwrap();
            }
            for pid in [id(), parent_id()] {
                let listener = UnixListener::bind(state.policy_socket_path(pid)).unwrap();
                let (sender, refuses) = (sender.clone(), refuses.clone());
                // Until the tests' process ends.
                std::thread::spawn(move || {
                    for client in listener.incoming() {
                        let (verb, object) = received(client.as_ref().unwrap());
                        let refused = match &verb {
                            PolicyVerb::Load { trial, .. } => refuses(pid, *trial),
                            _ => false,
                        };
                        sender.send((pid, verb, object)).unwrap();
                        let answer = match refused {
                            true => PolicyAnswer::Error("no".to_owned()),
                            false => PolicyAnswer::InForce(None),
                        };
                        let line = answer.line().unwrap();
                        client.unwrap().write_all(line.as_bytes()).unwrap();
                    }
                });
            }
            Self { dir, calls }
        }

        /// Loads a policy for all; the error, and the calls that were made.
        fn load(&self) -> (Option<String>, Vec<SeenCall>) {
            let file = self.dir.path().join("night.bpf.o");
            std::fs::write(&file, "object").unwrap();
            let done = load(&StateDir::at(self.dir.path()), &file, PolicyVms::All);
            let error = done.err().map(|error| format!("{error:#}"));
            (error, self.calls.try_iter().collect())
        }
    }

    fn received(client: &UnixStream) -> (PolicyVerb, Vec<u8>) {
        let (mut input, mut line, mut object) = (BufReader::new(client), Vec::new(), Vec::new());
        input.read_until(b'\n', &mut line).unwrap();
        let verb = PolicyVerb::read(&line).unwrap();
        if let PolicyVerb::Load { bytes, .. } = verb {
            input.take(bytes).read_to_end(&mut object).unwrap();
        }
        (verb, object)
    }

    /// Whether each call was a trial, all of this object.
    fn trials(calls: &[SeenCall]) -> Vec<(u32, bool)> {
        let is_trial = |(pid, verb, object): &SeenCall| match verb {
            PolicyVerb::Load { name, bytes, trial } => {
                assert_eq!((&**name, *bytes, &**object), ("night", 6, &b"object"[..]));
                (*pid, *trial)
            }
            other => panic!("{other:?}"),
        };
        calls.iter().map(is_trial).collect()
    }

    #[test]
    fn all_try_a_policy_before_one_has_it() {
        let (error, calls) = GuardedVms::new(None).load();
        assert_eq!(error, None);
        let calls = trials(&calls);
        let (tried, loaded) = calls.split_at(2);
        assert!(tried.iter().all(|(_, trial)| *trial), "{calls:?}");
        assert!(loaded.iter().all(|(_, trial)| !trial), "{calls:?}");
        for half in [tried, loaded] {
            let mut pids: Vec<u32> = half.iter().map(|(pid, _)| *pid).collect();
            let mut all = [id(), parent_id()];
            pids.sort_unstable();
            all.sort_unstable();
            assert_eq!(pids, all);
        }
    }

    #[test]
    fn what_one_vm_refuses_none_gets() {
        for refusing in [id(), parent_id()] {
            let (error, calls) = GuardedVms::new(Some(refusing)).load();
            assert_eq!(error, Some(format!("process {refusing}: no")));
            let calls = trials(&calls);
            assert!(calls.contains(&(refusing, true)), "{calls:?}");
            assert!(calls.iter().all(|(_, trial)| *trial), "{calls:?}");
        }
    }

    // Its kernel may refuse by then what it took on trial.
    #[test]
    fn where_one_refuses_after_its_trial_the_line_names_who_has_the_policy() {
        let mut named = 0;
        for refusing in [id(), parent_id()] {
            let guarded = GuardedVms::that_refuse(move |pid, trial| pid == refusing && !trial);
            let (error, calls) = guarded.load();
            let loads: Vec<_> = trials(&calls).into_iter().filter(|of| !of.1).collect();
            let line = match loads[..] {
                [(refused, _)] => format!("process {refused}: no"),
                [(has, _), (refused, _)] => {
                    named += 1;
                    format!("process {has} has the new policy by now: process {refused}: no")
                }
                _ => panic!("{loads:?}"),
            };
            assert_eq!(error, Some(line));
        }
        assert_eq!(named, 1);
    }

    #[test]
    fn one_that_hangs_up_without_a_look_is_not_late() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::at(dir.path());
        let listener = UnixListener::bind(state.policy_socket_path(id())).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (client, _) = listener.accept().unwrap();
                is_ready(client.as_fd(), PollFlags::POLLIN, PATIENCE)
            });
            let line = call(&state, id(), PolicyVerb::Reset, &[]).unwrap_err();
            assert!(line.to_string().contains("no calls of this user"), "{line}");
        });
    }

    #[test]
    fn without_a_vm_there_is_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let none = vms(&StateDir::at(dir.path()), PolicyVms::All).unwrap_err();
        assert!(none.to_string().contains("no guest of this user"), "{none}");
    }

    #[test]
    fn a_file_names_its_policy() {
        for (file, name) in [("night.bpf.o", "night"), ("/a.b/my-2", "my-2")] {
            assert_eq!(name_of(Path::new(file)).unwrap(), name);
        }
        for file in ["/", ".o", "my policy.o", "x\ny"] {
            let line = name_of(Path::new(file)).unwrap_err().to_string();
            assert!(line.contains("rename it"), "{line}");
        }
    }

    #[test]
    fn a_vm_is_a_process_or_all() {
        assert_eq!("all".parse(), Ok(PolicyVms::All));
        assert_eq!("7".parse(), Ok(PolicyVms::One(7)));
        for text in ["", "-1", "every"] {
            let line = text.parse::<PolicyVms>().unwrap_err();
            assert!(line.contains("its number, or all"), "{line}");
        }
    }

    #[test]
    fn each_vm_has_a_line() {
        let night = ShownPolicy {
            name: "night".to_owned(),
            sha256: "0123456789abcdef".repeat(4),
            since_unix_ms: 1_000,
            asked: 7,
            bounded: 2,
            silent: 1,
        };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(4);
        let text = table(&[(41, None), (42, Some(night))], now);
        let lines: Vec<Vec<_>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines[1][..2], ["41", "built-in"]);
        let expected = ["42", "night", "0123456789ab", "3", "s", "7", "2", "1"];
        assert_eq!(lines[2], expected);
    }
}
