// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A tree that behaves as the kernel does where that matters: masks come back in the kernel's
//! form, governors take their tunables with them, cgroups have files, interrupts arrive somewhere.
//! It can refuse a file, and die before or after any of its steps.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs, io,
    os::unix::fs::PermissionsExt,
    panic::resume_unwind,
    path::Path,
    time::Duration,
};

use nix::errno::Errno;
use tempfile::TempDir;
use vcpufreq_host::HostRoot;
use vcpufreq_host::undo::{Journal, KernelHost, LockedFile, ReadHost, Reading, Unread, WriteHost};
use vcpufreq_rt::CpuList;

pub const CPU: &str = "/sys/devices/system/cpu";
pub const CGROUP: &str = "/sys/fs/cgroup";
/// Another user than root and the one that runs the tests.
pub const STRANGER: u32 = 54_321;
pub const WORKQUEUE: &str = "/sys/devices/virtual/workqueue";

fn einval() -> io::Error {
    io::Error::from_raw_os_error(Errno::EINVAL as i32)
}

/// Removed with everything in it when dropped.
pub struct FakeKernel {
    dir: TempDir,
    files: KernelHost,
    /// Writes to paths that contain one of these fail.
    refused: RefCell<Vec<String>>,
    /// Reads of paths that contain one of these are denied.
    denied: RefCell<Vec<String>>,
    /// Whether policies have their governors' tunables in common.
    common: Cell<bool>,
    /// Limits as they were asked for, by path: what is shown is what holds.
    asked: RefCell<BTreeMap<String, u64>>,
    /// Steps until it dies; whether the last one still happens.
    dies: Cell<Option<(usize, bool)>>,
    /// Steps so far.
    pub steps: Cell<usize>,
    /// Every path that was written, made, removed or scheduled.
    pub touched: RefCell<Vec<String>>,
}

impl FakeKernel {
    pub fn empty() -> Self {
        // In memory where there is such a place: thousands of small files are made.
        let memory = Path::new("/dev/shm");
        let dir = match memory.is_dir() {
            true => TempDir::new_in(memory),
            false => TempDir::new(),
        };
        let dir = dir.unwrap();
        let files = KernelHost::at(dir.path());
        fs::create_dir(dir.path().join("run")).unwrap();
        let (refused, touched) = (RefCell::default(), RefCell::default());
        let asked = RefCell::default();
        let (dies, steps) = (Cell::new(None), Cell::new(0));
        Self {
            dir,
            files,
            refused,
            denied: RefCell::default(),
            asked,
            common: Cell::new(false),
            dies,
            steps,
            touched,
        }
    }

    /// A kernel thread if it is a CPU's, else a process of root's.
    pub fn thread(&self, pid: usize, name: &str, policy: i32, priority: i32) {
        self.put(&format!("/proc/{pid}/comm"), name);
        let mut middle = vec!["0"; 36];
        if name.contains('/') {
            // kthreadd is its parent, PF_KTHREAD and PF_NO_SETAFFINITY are among its flags.
            (middle[0], middle[5]) = ("2", "69238848");
        }
        self.users(pid, [0; 4]);
        let middle = middle.join(" ");
        let text = format!("{pid} ({name}) S {middle} {priority} {policy} 0 0");
        self.put(&format!("/proc/{pid}/stat"), &text);
    }

    /// A user's process with a kernel thread's name.
    pub fn impostor(&self, pid: usize, name: &str) {
        self.thread(pid, &name.replace('/', "-"), 0, 0);
        self.put(&format!("/proc/{pid}/comm"), name);
        self.users(pid, [STRANGER; 4]);
    }

    pub fn users(&self, pid: usize, users: [u32; 4]) {
        let [real, effective, saved, files] = users;
        let status = format!("Name:\tx\nUid:\t{real}\t{effective}\t{saved}\t{files}\nGid:\t0");
        self.put(&format!("/proc/{pid}/status"), &status);
    }

    /// Sets the scene: no step.
    pub fn put(&self, path: &str, text: &str) {
        let real = self.real(path);
        let dir = real.parent().unwrap();
        fs::create_dir_all(dir).unwrap();
        fs::write(&real, format!("{text}\n")).unwrap();
        if path.starts_with("/run/vcpufreq") {
            let own = |path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
            own(dir, 0o700).unwrap();
            own(&real, 0o600).unwrap();
        }
    }

    pub fn link(&self, path: &str, target: &str) {
        let real = self.real(path);
        fs::create_dir_all(real.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, real).unwrap();
    }

    pub fn remove(&self, path: &str) {
        let path = self.real(path);
        if path.is_dir() {
            fs::remove_dir_all(path).unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }

    /// Unmounts what is at `path`; it goes on as it was.
    pub fn take_away(&self, path: &str) -> TempDir {
        let away = TempDir::new_in(self.dir.path().parent().unwrap()).unwrap();
        fs::rename(self.real(path), away.path().join("there")).unwrap();
        fs::create_dir(self.real(path)).unwrap();
        away
    }

    pub fn bring_back(&self, path: &str, away: TempDir) {
        fs::remove_dir(self.real(path)).unwrap();
        fs::rename(away.path().join("there"), self.real(path)).unwrap();
    }

    pub fn mode(&self, path: &str, mode: u32) {
        fs::set_permissions(self.real(path), fs::Permissions::from_mode(mode)).unwrap();
    }

    pub fn put_bytes(&self, path: &str, bytes: &[u8]) {
        self.put(path, "");
        fs::write(self.real(path), bytes).unwrap();
    }

    pub fn tunables_in_common(&self) {
        self.common.set(true);
    }

    pub fn refuse(&self, part: &str) {
        self.refused.borrow_mut().push(part.to_owned());
    }

    pub fn deny(&self, part: &str) {
        self.denied.borrow_mut().push(part.to_owned());
    }

    pub fn relent(&self) {
        self.refused.borrow_mut().clear();
    }

    /// Dies at step `step` (from 0); whether that one still happens.
    pub fn die_at(&self, step: usize, happens: bool) {
        self.steps.set(0);
        self.dies.set(Some((step, happens)));
    }

    /// As another process at work holds the record.
    pub fn hold_record(&self) -> LockedFile {
        let path = self.real(vcpufreq_rt::PATH);
        let (dir, name) = (path.parent().unwrap(), path.file_name().unwrap());
        let journal = Journal::at(dir);
        let held = journal.hold(name.to_str().unwrap(), Duration::ZERO);
        held.unwrap()
    }

    pub fn revive(&self) {
        self.dies.set(None);
    }

    pub fn real(&self, path: &str) -> std::path::PathBuf {
        self.dir.path().join(path.trim_start_matches('/'))
    }

    /// Every file's text and every folder.
    pub fn snapshot(&self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.dir.path().to_path_buf()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(self.dir.path()).unwrap();
                let name = format!("/{}", name.display());
                if path.is_dir() {
                    found.insert(name, "folder".to_owned());
                    folders.push(path);
                } else if path.is_file() {
                    found.insert(name, fs::read_to_string(&path).unwrap().trim().to_owned());
                }
            }
        }
        found
    }

    /// One step: whether it happens at all, and whether the caller hears of it.
    /// A step that it dies at doesn't return: nothing comes after it.
    fn step(&self, path: &str, act: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let number = self.steps.replace(self.steps.get() + 1);
        let dies = self.dies.get().filter(|(dies, _)| number == *dies);
        match dies {
            Some((_, false)) => resume_unwind(Box::new("killed")),
            Some((_, true)) => {
                act()?;
                resume_unwind(Box::new("killed"))
            }
            None => {
                self.touched.borrow_mut().push(path.to_owned());
                act()
            }
        }
    }

    fn change(&self, path: &str, value: &str) -> io::Result<()> {
        if !self.real(path).exists() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let (folder, name) = path.rsplit_once('/').unwrap();
        let mask = || CpuList::from_mask(value).ok_or(io::ErrorKind::InvalidInput);
        match name {
            "smp_affinity" => {
                let cpus = mask()?;
                let first = cpus.iter().take(1).collect::<CpuList>();
                self.put(&format!("{folder}/effective_affinity"), &first.mask());
                self.put(path, &format!("0000{}", cpus.mask()));
            }
            "cpumask" if folder == WORKQUEUE => {
                self.put(&format!("{WORKQUEUE}/cpumask_requested"), &mask()?.mask());
                self.workqueue_mask();
            }
            "enabled" => {
                self.put(path, &format!("always never [{value}]"));
                self.recommend();
            }
            "scaling_governor" => self.govern(folder, value),
            "scaling_setspeed" => {
                self.put(path, value);
                self.put(&format!("{folder}/scaling_cur_freq"), value);
            }
            "scaling_min_freq" | "scaling_max_freq" => {
                let khz = value.parse().map_err(|_| einval())?;
                self.limits(folder);
                self.asked.borrow_mut().insert(path.to_owned(), khz);
                self.limits(folder);
            }
            // sysctl_sched_uclamp_handler().
            "sched_util_clamp_min" | "sched_util_clamp_max" => {
                let old = self.text(path);
                self.put(path, value);
                let of =
                    |end: &str| self.number(&format!("/proc/sys/kernel/sched_util_clamp_{end}"));
                if of("min") > of("max") || of("max") > 1024 {
                    self.put(path, &old);
                    return Err(einval());
                }
            }
            "cgroup.subtree_control" => self.control(path, value),
            "cpuset.cpus.partition" => {
                self.put(path, value);
                self.isolate();
            }
            _ => self.put(path, value),
        }
        Ok(())
    }

    fn text(&self, path: &str) -> String {
        self.files.read(path).unwrap()
    }

    fn number(&self, path: &str) -> u64 {
        self.text(path).parse().unwrap()
    }

    /// cpufreq_verify_within_limits(): what was asked for, within what there is, and no minimum
    /// above the maximum.
    fn limits(&self, dir: &str) {
        let path = |name: &str| format!("{dir}/{name}");
        let asked = |name: &str| {
            let now = self.number(&path(name));
            *self.asked.borrow_mut().entry(path(name)).or_insert(now)
        };
        let range = ["cpuinfo_min_freq", "cpuinfo_max_freq"].map(|name| self.number(&path(name)));
        let max = asked("scaling_max_freq").clamp(range[0], range[1]);
        let min = asked("scaling_min_freq").clamp(range[0], max);
        self.put(&path("scaling_max_freq"), &max.to_string());
        self.put(&path("scaling_min_freq"), &min.to_string());
    }

    /// set_recommended_min_free_kbytes(), with each choice of transparent huge pages.
    fn recommend(&self) {
        const PATH: &str = "/proc/sys/vm/min_free_kbytes";
        const RECOMMENDED: u64 = 90_112;
        if self.real(PATH).exists() && self.number(PATH) < RECOMMENDED {
            self.put(PATH, &RECOMMENDED.to_string());
        }
    }

    fn govern(&self, dir: &str, governor: &str) {
        let path = format!("{dir}/scaling_governor");
        if self.text(&path) == governor {
            return;
        }
        self.put(&path, governor);
        // cpufreq_gov_userspace starts at the frequency that is.
        let speed = match governor {
            "userspace" => self.text(&format!("{dir}/scaling_cur_freq")),
            _ => "<unsupported>".to_owned(),
        };
        self.put(&format!("{dir}/scaling_setspeed"), &speed);
        if governor == "schedutil" {
            let dir_of = match self.common.get() {
                true => format!("{CPU}/cpufreq"),
                false => dir.to_owned(),
            };
            self.put(&format!("{dir_of}/schedutil/rate_limit_us"), "10000");
            self.put(&format!("{dir}/scaling_cur_freq"), "600000");
        } else {
            for dir in [dir, &format!("{CPU}/cpufreq")] {
                if self.list(&format!("{dir}/schedutil")).is_ok() {
                    self.remove(&format!("{dir}/schedutil"));
                }
            }
            let max = self.text(&format!("{dir}/scaling_max_freq"));
            self.put(&format!("{dir}/scaling_cur_freq"), &max);
        }
    }

    fn control(&self, path: &str, value: &str) {
        let now = self.text(path);
        let (sign, changed) = value.split_at(1);
        let mut names: Vec<&str> = now.split_whitespace().collect();
        names.retain(|name| *name != changed);
        if sign == "+" {
            names.insert(0, changed);
        }
        self.put(path, &names.join(" "));
    }

    /// The CPUs of all isolated groups, below the root.
    fn isolate(&self) {
        let mut isolated = CpuList::default();
        for (path, text) in self.snapshot() {
            if path.ends_with("/cpuset.cpus.partition") && text == "isolated" {
                let cpus = path.replace(".partition", "");
                isolated = isolated.or(&self.text(&cpus).parse().unwrap());
            }
        }
        self.put(
            &format!("{CGROUP}/cpuset.cpus.isolated"),
            &isolated.to_string(),
        );
        self.workqueue_mask();
    }

    fn workqueue_mask(&self) {
        let requested = self.text(&format!("{WORKQUEUE}/cpumask_requested"));
        let isolated = self.text(&format!("{CGROUP}/cpuset.cpus.isolated"));
        let mask = CpuList::from_mask(&requested).unwrap();
        let mask = mask.without(&isolated.parse().unwrap());
        self.put(&format!("{WORKQUEUE}/cpumask"), &mask.mask());
    }

    fn make_group(&self, path: &str) -> io::Result<()> {
        fs::create_dir(self.real(path))?;
        for name in [
            "cgroup.type",
            "cgroup.subtree_control",
            "cpuset.cpus",
            "cpuset.cpus.exclusive",
            "cpuset.cpus.partition",
            "cpu.uclamp.min",
        ] {
            self.put(&format!("{path}/{name}"), "");
        }
        Ok(())
    }

    fn remove_group(&self, path: &str) -> io::Result<()> {
        let folders = fs::read_dir(self.real(path))?;
        if folders
            .into_iter()
            .any(|entry| entry.unwrap().path().is_dir())
        {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        self.remove(path);
        self.isolate();
        Ok(())
    }

    fn is_refused(&self, path: &str) -> io::Result<()> {
        let refused = self.refused.borrow();
        match refused.iter().any(|part| path.contains(part)) {
            true => Err(io::Error::from_raw_os_error(Errno::EIO as i32)),
            false => Ok(()),
        }
    }
}

impl ReadHost for FakeKernel {
    fn read(&self, path: &str) -> Reading {
        let denied = self.denied.borrow();
        if denied.iter().any(|part| path.contains(part)) {
            return Err(Unread::Denied);
        }
        self.files.read(path)
    }

    fn bytes(&self, path: &str) -> Result<Vec<u8>, Unread> {
        self.files.bytes(path)
    }

    fn list(&self, path: &str) -> Result<Vec<String>, Unread> {
        self.files.list(path)
    }

    fn writable(&self, path: &str) -> bool {
        self.files.writable(path)
    }

    fn link_name(&self, path: &str) -> Option<String> {
        self.files.link_name(path)
    }

    fn root(&self) -> &HostRoot {
        self.files.root()
    }
}

impl WriteHost for FakeKernel {
    fn as_look(&self) -> &dyn ReadHost {
        self
    }

    fn write(&self, path: &str, value: &str) -> io::Result<()> {
        self.step(path, || {
            self.is_refused(path)?;
            self.change(path, value)
        })
    }

    fn make_dir(&self, path: &str) -> io::Result<()> {
        self.step(path, || {
            self.is_refused(path)?;
            self.make_group(path)
        })
    }

    fn remove_dir(&self, path: &str) -> io::Result<()> {
        self.step(path, || {
            self.is_refused(path)?;
            self.remove_group(path)
        })
    }

    fn schedule(&self, pid: u32, policy: &str) -> io::Result<()> {
        let path = format!("/proc/{pid}/stat");
        self.step(&path, || {
            self.is_refused(&path)?;
            let name = self.text(&format!("/proc/{pid}/comm"));
            let (kind, priority) = policy.split_once(':').unwrap();
            let number = ["other", "fifo", "rr"].iter().position(|of| *of == kind);
            let number = i32::try_from(number.unwrap()).unwrap();
            let pid = usize::try_from(pid).unwrap();
            self.thread(pid, &name, number, priority.parse().unwrap());
            Ok(())
        })
    }
}
