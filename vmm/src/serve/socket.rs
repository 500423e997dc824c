// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The socket that a VMM connects to.

use std::{
    fs,
    io::{self, ErrorKind},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use nix::{
    fcntl::{OFlag, open},
    poll::PollFlags,
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    sys::stat::Mode,
    unistd::{User, chown, geteuid},
};

use super::vmm::{Connection, ServedVmm};
use crate::{patience::patience, sys};

/// How long the child of a server that was killed may take to close that server's socket.
const CLOSES_WITHIN: Duration = patience(5);

/// The socket at which the server listens. Dropping it removes its file, if this program has made
/// that.
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and number of the file, if this program has made it.
    file: Option<(u64, u64)>,
    allowed: Allowed,
}

/// Whose VMM may connect.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// A user besides this program's.
    pub user: Option<User>,
    /// The only process, if it is known.
    pub pid: Option<u32>,
}

impl Allowed {
    /// Whether process `pid` is one that may.
    pub fn is_pid(&self, pid: u32) -> bool {
        self.pid.is_none_or(|only| only == pid)
    }

    fn is_user(&self, user: u32) -> bool {
        let other = self.user.as_ref();
        other.is_some_and(|other| other.uid.as_raw() == user)
    }
}

/// A VMM that may not connect. Its user is looked up when that is a line.
#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} is user {0}'s; to serve it, start serve with --user {0}",
    name_of(*user)
)]
struct OtherUser {
    pid: u32,
    user: u32,
}

/// A user's name, or number where there is no name.
fn name_of(user: u32) -> String {
    let known = User::from_uid(user.into()).ok().flatten();
    known.map_or_else(|| user.to_string(), |user| user.name)
}

impl Socket {
    /// The one that a service manager has made, else a new one at `path`.
    ///
    /// # Errors
    /// When there is neither.
    pub fn open(
        path: Option<&Path>,
        allowed: Allowed,
        handed: &mut Vec<OwnedFd>,
    ) -> anyhow::Result<Self> {
        if let Some(socket) = Self::inherited(handed, path, allowed.clone()) {
            return Ok(socket);
        }
        let path = path.context("no socket is given; name one with --socket PATH")?;
        Self::bind(path, allowed)
    }

    /// Makes the socket at `path`, which this user alone can connect to, or `allowed`'s. One that a
    /// killed server left is taken away; anything else that is there stays.
    fn bind(path: &Path, allowed: Allowed) -> anyhow::Result<Self> {
        remove_dead(path)?;
        let listener = UnixListener::bind(path).with_context(|| {
            format!(
                "can't make the socket {}; name another --socket",
                path.display()
            )
        })?;
        let mut socket = Self {
            listener,
            path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
            file: None,
            allowed,
        };
        let file =
            opened(path).with_context(|| format!("can't open the socket {}", path.display()))?;
        socket.file = file.metadata().ok().map(|file| (file.dev(), file.ino()));
        let name = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        fs::set_permissions(&name, fs::Permissions::from_mode(0o600))
            .with_context(|| format!("can't close the socket {} to others", path.display()))?;
        if let Some(user) = &socket.allowed.user {
            chown(&name, Some(user.uid), None).with_context(|| {
                let (shown, user) = (path.display(), &user.name);
                format!("can't give {shown} to user {user}; start serve as root")
            })?;
        }
        Ok(socket)
    }

    /// The one that a service manager has made: that at `path`, or the only one. It is left there.
    /// The user that the manager gave it to may connect, if `allowed` has none.
    fn inherited(
        files: &mut Vec<OwnedFd>,
        path: Option<&Path>,
        mut allowed: Allowed,
    ) -> Option<Self> {
        let index = files.iter().position(|file| {
            let at = bound_to(file);
            at.is_some_and(|at| path.is_none_or(|path| path == at))
        })?;
        let path = bound_to(&files[index])?;
        allowed.user = allowed.user.or_else(|| owner_of(&path));
        Some(Self {
            listener: files.swap_remove(index).into(),
            path,
            file: None,
            allowed,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose VMM may connect.
    pub fn allowed(&self) -> &Allowed {
        &self.allowed
    }

    /// Takes the VMM that has connected.
    pub fn accept(&self) -> anyhow::Result<ServedVmm> {
        let (stream, _) = self
            .listener
            .accept()
            .context("can't accept its connection")?;
        let stream = Connection::new(stream);
        let peer = getsockopt(&stream, PeerCredentials).context("can't read its process number")?;
        let own = geteuid().as_raw();
        let may = |user: u32| user == own || self.allowed.is_user(user);
        let pid = u32::try_from(peer.pid()).ok().filter(|pid| *pid > 0);
        let pid = pid.context("its process is in another PID namespace")?;
        if !may(peer.uid()) {
            let user = peer.uid();
            return Err(OtherUser { pid, user }.into());
        }
        if !self.allowed.is_pid(pid) {
            bail!("process {pid} isn't --pid");
        }
        ServedVmm::connected(stream, pid, self.path.clone())
    }
}

/// The user that the socket at `path` belongs to.
fn owner_of(path: &Path) -> Option<User> {
    let file = fs::symlink_metadata(path).ok()?;
    let owner = file.file_type().is_socket().then(|| file.uid())?;
    User::from_uid(owner.into()).ok().flatten()
}

/// Where a file listens, if it is a socket that does.
fn bound_to(file: &OwnedFd) -> Option<PathBuf> {
    use nix::sys::socket::{UnixAddr, getsockname, sockopt::AcceptConn};
    use std::os::fd::AsRawFd;
    if !getsockopt(file, AcceptConn).ok()? {
        return None;
    }
    let address: UnixAddr = getsockname(file.as_raw_fd()).ok()?;
    address.path().map(Path::to_owned)
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Another server may have its own there by now.
        if self.file.is_some() && self.file == id_of(&self.path) {
            // A directory that is gone has taken it along.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The socket at `path` itself, whatever is put there later.
fn opened(path: &Path) -> io::Result<fs::File> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let file = fs::File::from(open(path, flags, Mode::empty())?);
    if !file.metadata()?.file_type().is_socket() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(file)
}

/// Device and number of the file at `path`.
fn id_of(path: &Path) -> Option<(u64, u64)> {
    let file = fs::symlink_metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

fn remove_dead(path: &Path) -> anyhow::Result<()> {
    let shown = path.display();
    match fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(file) if file.file_type().is_socket() && file.uid() != geteuid().as_raw() => {
            bail!(
                "user {}'s socket is at {shown}; name another --socket",
                name_of(file.uid())
            )
        }
        Ok(file) if file.file_type().is_socket() => {}
        Ok(_) => bail!("{shown} isn't a socket; name another --socket"),
    }
    let until = Instant::now() + CLOSES_WITHIN;
    loop {
        match sys::connect_now(path) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                return fs::remove_file(path)
                    .with_context(|| format!("can't remove the dead socket {shown}"));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                bail!(
                    "a server that takes no connections is at {shown}; see why, or name another --socket"
                )
            }
            Err(error) => {
                return Err(error).with_context(|| {
                    format!("can't look at the socket {shown}; name another --socket")
                });
            }
            Ok(probe) if is_listener_gone(&probe) && is_closed_before(&probe, until) => {}
            Ok(_) => bail!("another server answers at {shown}; end it, or name another --socket"),
        }
    }
}

/// Whether the process that listens at the other end has ended. A child that it has just forked has a
/// copy of its socket until that child closes it, or is killed: connections go on to arrive there.
fn is_listener_gone(probe: &UnixStream) -> bool {
    match sys::peer_pidfd(probe.as_fd()) {
        Ok(process) => sys::is_ready(process.as_fd(), PollFlags::POLLIN, Duration::ZERO),
        // Before Linux 6.5.
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            let peer = getsockopt(probe, PeerCredentials);
            peer.is_ok_and(|peer| !Path::new(&format!("/proc/{}", peer.pid())).exists())
        }
        // The kernel knows no such process any more.
        Err(_) => true,
    }
}

/// Whether the other end is closed by then.
fn is_closed_before(probe: &UnixStream, until: Instant) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    sys::is_ready(probe.as_fd(), PollFlags::empty(), left)
}

#[cfg(test)]
mod tests {
    //! A socket takes the place of a dead one only, and identifies the process that connects.
    use std::{
        os::unix::process::CommandExt,
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn a_server_with_a_full_queue_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm");
        let hangs = UnixListener::bind(&path).unwrap();
        let backlog = nix::sys::socket::Backlog::new(0).unwrap();
        nix::sys::socket::listen(&hangs, backlog).unwrap();
        let _waits = UnixStream::connect(&path).unwrap();
        let refused = remove_dead(&path).unwrap_err().to_string();
        assert!(refused.contains("takes no connections"), "{refused}");
    }

    #[test]
    fn a_dead_socket_gives_way() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm");
        drop(UnixListener::bind(&path).unwrap());
        let socket = Socket::bind(&path, Allowed::default()).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let _vmm = UnixStream::connect(&path).unwrap();
        assert_eq!(socket.accept().unwrap().pid(), std::process::id());
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn another_process_is_refused_if_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm");
        let own = std::process::id();
        for (pid, may) in [(own, true), (own + 1, false)] {
            let pid = Some(pid);
            let socket = Socket::bind(&path, Allowed { user: None, pid }).unwrap();
            let _vmm = UnixStream::connect(&path).unwrap();
            let line = socket.accept().err().map(|error| error.to_string());
            let refused = (!may).then(|| format!("process {own} isn't --pid"));
            assert_eq!(line, refused);
        }
    }

    /// Seen once in 1,000 kills: the server was killed between fork and the child's start.
    #[test]
    fn a_killed_servers_child_that_still_has_the_socket_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm");
        // The child ends once it has the connection of a server that looks who answers.
        let script = "import os,socket,sys; s=socket.socket(1); s.bind(sys.argv[1]); s.listen(); \
                      os.fork() or s.accept()";
        let server = Command::new("python3")
            .args(["-c", script])
            .arg(&path)
            .status();
        if server.is_err() {
            println!("SKIP: a server that was killed: no python3");
            return;
        }
        let socket = Socket::bind(&path, Allowed::default()).unwrap();
        let _vmm = UnixStream::connect(&path).unwrap();
        assert_eq!(socket.accept().unwrap().pid(), std::process::id());
    }

    #[test]
    fn what_is_in_use_stays() {
        let dir = tempfile::tempdir().unwrap();
        let [live, file] = ["live", "file"].map(|name| dir.path().join(name));
        let _server = UnixListener::bind(&live).unwrap();
        fs::write(&file, "mine").unwrap();
        for (path, said) in [(&live, "another server answers"), (&file, "isn't a socket")] {
            let line = Socket::bind(path, Allowed::default())
                .err()
                .unwrap()
                .to_string();
            assert!(line.contains(said), "{line}");
            assert!(path.exists());
        }
    }

    #[test]
    fn another_users_socket_stays() {
        if !geteuid().is_root() {
            println!("SKIP: another user's socket: takes root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm");
        drop(UnixListener::bind(&path).unwrap());
        chown(&path, Some(65534.into()), None).unwrap();
        let line = Socket::bind(&path, Allowed::default()).err().unwrap();
        assert!(line.to_string().contains("'s socket is at"), "{line}");
        assert!(path.exists());
    }

    #[test]
    fn a_file_that_took_the_sockets_place_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm");
        let socket = Socket::bind(&path, Allowed::default()).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(socket);
        assert!(path.exists());
    }

    #[test]
    fn another_users_vmm_is_refused_unless_it_is_named() {
        if !geteuid().is_root() {
            println!("SKIP: another user's VMM: takes root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm");
        let nobody = || User::from_uid(65534.into()).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        for (user, owner) in [(None, 0), (nobody(), 65534)] {
            let refused = user.is_none();
            let socket = Socket::bind(&path, Allowed { user, pid: None }).unwrap();
            let found = fs::metadata(&path).unwrap();
            assert_eq!((found.uid(), found.mode() & 0o777), (owner, 0o600));
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
            let script = "import socket,sys; s=socket.socket(1); s.connect(sys.argv[1]); \
                          sys.stdin.read()";
            let connected = Command::new("python3")
                .args(["-c", script])
                .arg(&path)
                .uid(65534)
                .stdin(Stdio::piped())
                .spawn();
            let Ok(mut vmm) = connected else {
                println!("SKIP: another user's VMM: no python3");
                return;
            };
            let vmm_pid = vmm.id();
            let taken = socket.accept();
            // Closes its input.
            vmm.wait().unwrap();
            match taken {
                Err(why) if refused => assert!(why.to_string().contains("--user"), "{why}"),
                taken => assert!(!refused && taken.is_ok_and(|vmm| vmm.pid() == vmm_pid)),
            }
        }
    }

    #[test]
    fn a_service_managers_socket_is_left_there() {
        let dir = tempfile::tempdir().unwrap();
        let [path, other] = ["vm", "other"].map(|name| dir.path().join(name));
        let make = |path: &Path| OwnedFd::from(UnixListener::bind(path).unwrap());
        let mut files = vec![make(&other), make(&path)];
        files.push(fs::File::open("/dev/null").unwrap().into());
        let any = Allowed::default;
        let socket = Socket::inherited(&mut files, Some(&path), any()).unwrap();
        assert_eq!((socket.path(), files.len()), (&*path, 2));
        let _vmm = UnixStream::connect(&path).unwrap();
        assert_eq!(socket.accept().unwrap().pid(), std::process::id());
        drop(socket);
        assert!(path.exists());
        assert!(Socket::inherited(&mut files, Some(&path), any()).is_none());
        let only = Socket::inherited(&mut files, None, any()).unwrap();
        assert_eq!(only.path(), other);
    }

    #[test]
    fn the_user_that_has_a_service_managers_socket_may_connect() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm");
        let mut files = vec![UnixListener::bind(&path).unwrap().into()];
        let nobody = Some(65534.into());
        if chown(&path, nobody, None).is_err() {
            println!("SKIP: another user's socket: takes root");
            return;
        }
        let socket = Socket::inherited(&mut files, None, Allowed::default()).unwrap();
        let may = |user| socket.allowed.is_user(user);
        assert!(may(65534) && !may(65533));
    }
}
