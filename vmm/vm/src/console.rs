// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's console: a 16550 on the bus, this process's terminal or pipes
//! at the other end, or what else [`console_output`](super::console_output) writes to.
//!
//! Output goes out byte by byte, as the guest writes it; a vCPU waits for
//! the reader. Input is held back until the guest's driver has turned
//! the receive interrupt on and the FIFO has room, so that nothing which a
//! script sends early is lost. The thread that brings input never waits for a
//! vCPU: it is also the one that hears of signals and of Ctrl-A x.

use std::collections::VecDeque;
use std::io::{self, Stdin, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst, fence};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use nix::errno::Errno;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use nix::unistd;
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial};
use vmm_sys_util::eventfd::EventFd;

use super::bus::MmioDevice;
use super::sys;

/// Interrupt enable register, and its bit for received data.
const IER: u8 = 1;
const IER_RECEIVED: u8 = 1;
/// Interrupt identification register, its bits for the cause, and two of them.
const IIR: u8 = 2;
const IIR_CAUSE: u8 = 0xf;
const IIR_NONE: u8 = 1;
const IIR_RECEIVED: u8 = 4;
/// Line status register, and its bit for received data.
const LSR: u8 = 5;
const LSR_RECEIVED: u8 = 1;
/// Line control register, and its bit that puts the divisor in IER's place.
const LCR: u8 = 3;
const LCR_DIVISOR: u8 = 0x80;
/// Modem control register, and its bit that turns the port back on itself.
const MCR: u8 = 4;
const MCR_LOOP: u8 = 0x10;

/// Raises the console's interrupt.
struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Where the guest's output goes.
pub type ConsoleWriter = Box<dyn Write + Send>;

type Port = Serial<Interrupt, NoEvents, ConsoleWriter>;

/// The console on the bus.
pub struct Console {
    serial: Mutex<Port>,
    room: EventFd,
    /// There is input that the port did not take. It comes again when
    /// [`Self::room`] is readable. Nothing else makes it so: a guest without
    /// input cannot wake the thread that brings it.
    turned_away: AtomicBool,
}

impl Console {
    /// A console that writes to `output` and raises its interrupt through
    /// `interrupt`.
    pub fn new(interrupt: EventFd, output: ConsoleWriter) -> io::Result<Self> {
        Ok(Self {
            serial: Mutex::new(Serial::new(Interrupt(interrupt), output)),
            room: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            turned_away: AtomicBool::new(false),
        })
    }

    /// Readable when there is room for input that was turned away.
    pub fn room_event(&self) -> &EventFd {
        &self.room
    }

    /// Moves to the guest what it takes of `input` now. Doesn't wait for a vCPU
    /// that is at the port.
    pub fn feed(&self, input: &mut VecDeque<u8>) {
        if input.is_empty() {
            return;
        }
        self.turned_away.store(true, SeqCst);
        // Pairs with the fence in `leave`: either the port is free here, or
        // the vCPU that leaves it sees `turned_away`.
        fence(SeqCst);
        let mut port = match self.serial.try_lock() {
            Ok(port) => port,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let before = room(&mut port);
        let bytes: Vec<_> = input.iter().copied().take(before).collect();
        // What the port refuses stays in the queue.
        let _ = port.enqueue_raw_bytes(&bytes);
        input.drain(..before.saturating_sub(room(&mut port)));
        // With the port locked: room is made after this.
        self.turned_away.store(!input.is_empty(), SeqCst);
    }

    fn enter(&self) -> MutexGuard<'_, Port> {
        // The registers are valid after a panic too.
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self, mut port: MutexGuard<'_, Port>) {
        let empty = room(&mut port) > 0 && !has_received(&mut port);
        drop(port);
        fence(SeqCst);
        if empty && self.turned_away.swap(false, SeqCst) {
            // Fails when the counter is full only, and then it is readable anyway.
            let _ = self.room.write(1);
        }
    }
}

/// How many bytes of input the guest can take now.
fn room(port: &mut Port) -> usize {
    let turned_back = port.read(MCR) & MCR_LOOP != 0;
    match wants_input(port) && !turned_back {
        true => port.fifo_capacity(),
        false => 0,
    }
}

/// Whether there is input that the guest hasn't taken.
fn has_received(port: &mut Port) -> bool {
    port.read(LSR) & LSR_RECEIVED != 0
}

/// Whether the guest's driver has turned the receive interrupt on.
fn wants_input(port: &mut Port) -> bool {
    let divisor = port.read(LCR) & LCR_DIVISOR != 0;
    !divisor && port.read(IER) & IER_RECEIVED != 0
}

/// Reads a register. As long as there is received data, that is a cause of the
/// interrupt: Linux' driver takes 256 bytes, asks whether there is a cause, and goes
/// on or returns. The port alone has none from the first byte that is read until
/// more input comes, and what is left would wait for that.
fn read_register(port: &mut Port, offset: u8) -> u8 {
    let value = port.read(offset);
    let none = offset == IIR && value & IIR_CAUSE == IIR_NONE;
    if none && wants_input(port) && has_received(port) {
        return value & !IIR_CAUSE | IIR_RECEIVED;
    }
    value
}

impl MmioDevice for Console {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (Ok(offset), [byte]) = (u8::try_from(offset), data) {
            let mut port = self.enter();
            *byte = read_register(&mut port, offset);
            self.leave(port);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (Ok(offset), [byte]) = (u8::try_from(offset), data) {
            let mut port = self.enter();
            // Output that can't be written (a closed pipe) is lost, as on a
            // real line.
            let _ = port.write(offset, *byte);
            self.leave(port);
        }
    }
}

/// What the terminal's keys ask for.
#[derive(Debug, PartialEq, Eq)]
pub enum Keys {
    /// These bytes are for the guest.
    Guest(Vec<u8>),
    /// Ctrl-A x: end the virtual machine.
    Quit,
}

/// Finds Ctrl-A x in what is typed; Ctrl-A twice is one for the guest.
#[derive(Debug, Default)]
pub struct Escape {
    pending: bool,
}

const CTRL_A: u8 = 1;

impl Escape {
    /// Takes the next bytes that were typed.
    pub fn take(&mut self, typed: &[u8]) -> Keys {
        let mut guest = Vec::with_capacity(typed.len());
        for &byte in typed {
            match (std::mem::take(&mut self.pending), byte) {
                (true, b'x' | b'X') => return Keys::Quit,
                (true, CTRL_A) => guest.push(CTRL_A),
                (true, other) => guest.extend([CTRL_A, other]),
                (false, CTRL_A) => self.pending = true,
                (false, other) => guest.push(other),
            }
        }
        Keys::Guest(guest)
    }
}

/// Most bytes that are kept for a guest that doesn't take them. What is typed
/// beyond that is lost; a pipe isn't read from meanwhile.
const QUEUE_MAX: usize = 4096;

/// Standard input on its way to the guest; by default none at all: standard input and its terminal
/// are left alone.
#[derive(Default)]
pub struct Input {
    terminal: Option<RawTerminal>,
    escape: Escape,
    queue: VecDeque<u8>,
    open: bool,
}

impl Input {
    /// Takes standard input, its terminal into raw mode if it is one.
    ///
    /// A terminal that belongs to another job is left alone: reading from it
    /// would stop this one.
    pub fn open() -> io::Result<Self> {
        let stdin = io::stdin();
        let (terminal, open) = match tcgetattr(&stdin) {
            Ok(_) if !in_foreground(&stdin) => (None, false),
            Ok(settings) => (Some(RawTerminal::enter(settings)?), true),
            Err(_) => (None, true),
        };
        Ok(Self {
            terminal,
            open,
            ..Self::default()
        })
    }

    /// The descriptor to wait for, if there is anything to wait for: a terminal
    /// always, because of Ctrl-A x; a pipe when the guest has taken the rest.
    pub fn source(&self) -> Option<RawFd> {
        let wanted = self.open && (self.terminal.is_some() || self.queue.is_empty());
        wanted.then(|| io::stdin().as_raw_fd())
    }

    /// Reads what is there. Returns true when Ctrl-A x was typed.
    pub fn read(&mut self) -> bool {
        let mut buffer = [0; 256];
        match unistd::read(io::stdin(), &mut buffer) {
            Ok(0) => self.open = false,
            Ok(len) if self.terminal.is_some() => match self.escape.take(&buffer[..len]) {
                Keys::Guest(bytes) => self.enqueue(&bytes),
                Keys::Quit => return true,
            },
            Ok(len) => self.enqueue(&buffer[..len]),
            Err(error) => self.open = matches!(error, Errno::EINTR | Errno::EAGAIN),
        }
        false
    }

    /// Moves to the guest what `console` has room for.
    pub fn feed(&mut self, console: &Console) {
        console.feed(&mut self.queue);
    }

    fn enqueue(&mut self, bytes: &[u8]) {
        let room = QUEUE_MAX.saturating_sub(self.queue.len());
        self.queue.extend(bytes.iter().take(room));
    }
}

/// Whether this process may read from and set up a terminal without being stopped for it. A
/// terminal that doesn't control this session stops no process.
fn in_foreground(terminal: &Stdin) -> bool {
    unistd::tcgetpgrp(terminal).map_or(true, |group| group == unistd::getpgrp())
}

/// A terminal in raw mode, until dropped or until the process crashes.
struct RawTerminal {
    settings: Termios,
    _crash: sys::RestoreOnCrash,
}

impl RawTerminal {
    fn enter(settings: Termios) -> io::Result<Self> {
        let stdin = io::stdin();
        let crash = sys::RestoreOnCrash::arm(stdin.as_raw_fd(), settings.clone().into())?;
        let mut raw = settings.clone();
        cfmakeraw(&mut raw);
        tcsetattr(stdin, SetArg::TCSANOW, &raw)?;
        Ok(Self {
            settings,
            _crash: crash,
        })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // A terminal that has gone away needs no settings.
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &self.settings);
    }
}

#[cfg(test)]
mod tests {
    //! Input waits until the guest takes it, and in no other way; Ctrl-A x is
    //! found however it is typed; other access widths than a byte do nothing.

    use std::sync::{Arc, mpsc};

    use super::*;

    const FCR_AND_IIR: u64 = 2;
    const LSR: u64 = 5;

    fn cause(console: &Console) -> u8 {
        read(console, FCR_AND_IIR) & 0xf
    }

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn console() -> (Console, EventFd, Written) {
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let written = Written::default();
        let output = Box::new(written.clone());
        let console = Console::new(interrupt.try_clone().unwrap(), output).unwrap();
        (console, interrupt, written)
    }

    /// A console whose driver takes input.
    fn driven() -> Console {
        let (console, ..) = console();
        console.write(u64::from(IER), &[IER_RECEIVED]);
        console
    }

    fn read(console: &Console, register: u64) -> u8 {
        let mut byte = [0xaa];
        MmioDevice::read(console, register, &mut byte);
        byte[0]
    }

    fn input(bytes: &[u8]) -> Input {
        Input {
            queue: bytes.iter().copied().collect(),
            ..Input::default()
        }
    }

    fn is_woken(console: &Console) -> bool {
        console.room_event().read().is_ok()
    }

    // A guest woke the main thread by each write of IER and each empty read.
    #[test]
    fn accesses_wake_nobody_without_input_that_was_turned_away() {
        let (console, ..) = console();
        let flood = || {
            for register in 0..8 {
                for byte in 0..=u8::MAX {
                    console.write(register, &[byte]);
                    read(&console, register);
                }
            }
            console.write(u64::from(LCR), &[3]);
            console.write(u64::from(MCR), &[0]);
            console.write(u64::from(IER), &[IER_RECEIVED]);
        };
        flood();
        assert!(!is_woken(&console));
        input(b"hi").feed(&console);
        assert_eq!([read(&console, 0), read(&console, 0)], *b"hi");
        assert!(!is_woken(&console), "all of it was taken");
        flood();
        assert!(!is_woken(&console));
    }

    #[test]
    fn input_beyond_the_fifo_is_asked_for_once_the_fifo_is_empty() {
        let console = driven();
        let mut input = input(&[b'x'; 100]);
        input.feed(&console);
        let in_fifo = 100 - input.queue.len();
        for left in (0..in_fifo).rev() {
            assert!(!is_woken(&console), "{left} more");
            assert_eq!(read(&console, 0), b'x');
        }
        assert!(is_woken(&console));
        assert_eq!(read(&console, 0), 0);
        assert!(!is_woken(&console), "once");
    }

    #[test]
    fn input_waits_for_the_driver() {
        let (console, interrupt, _) = console();
        let mut input = input(b"hi");
        input.feed(&console);
        assert_eq!(read(&console, LSR) & 1, 0);
        console.write(u64::from(IER), &[IER_RECEIVED]);
        assert!(console.room_event().read().is_ok());
        input.feed(&console);
        assert!(interrupt.read().is_ok());
        assert_eq!(read(&console, FCR_AND_IIR) & 0xf, 4);
        assert_eq!([read(&console, 0), read(&console, 0)], *b"hi");
        assert_eq!(read(&console, LSR) & 1, 0);
    }

    #[test]
    fn input_waits_while_the_port_has_another_use() {
        let uses = [
            ("the divisor is set", LCR, LCR_DIVISOR, 3),
            ("it is turned back on itself", MCR, MCR_LOOP, 0),
        ];
        for (name, register, busy, free) in uses {
            let console = driven();
            console.write(u64::from(register), &[busy]);
            let mut input = input(b"hi");
            input.feed(&console);
            assert_eq!(input.queue.len(), 2, "{name}");
            console.write(u64::from(register), &[free]);
            assert!(is_woken(&console), "{name}: to be asked again");
            input.feed(&console);
            let got = [read(&console, 0), read(&console, 0)];
            assert_eq!(got, *b"hi", "{name}");
        }
    }

    /// An output that takes nothing until the test opens it.
    struct Gate(mpsc::Sender<()>, mpsc::Receiver<()>);

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let Gate(waiting, open) = self;
            let _ = waiting.send(());
            let _ = open.recv();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn input_does_not_wait_for_a_vcpu_that_waits_for_a_reader() {
        let ((waits, waiting), (open, opened)) = (mpsc::channel(), mpsc::channel());
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let console = Console::new(interrupt, Box::new(Gate(waits, opened))).unwrap();
        console.write(u64::from(IER), &[IER_RECEIVED]);
        let mut input = input(b"hi");
        std::thread::scope(|scope| {
            let vcpu = scope.spawn(|| console.write(0, b"o"));
            waiting.recv().unwrap();
            input.feed(&console);
            assert_eq!(input.queue.len(), 2, "returned, and lost nothing");
            assert!(console.room_event().read().is_err());
            open.send(()).unwrap();
            vcpu.join().unwrap();
        });
        assert!(console.room_event().read().is_ok(), "to be asked again");
        input.feed(&console);
        assert_eq!([read(&console, 0), read(&console, 0)], *b"hi");
    }

    #[test]
    fn a_long_input_arrives_whole_and_in_order() {
        let console = driven();
        let sent: Vec<_> = (0..=255).collect();
        let mut input = input(&sent);
        let mut arrived = Vec::new();
        while arrived.len() < sent.len() {
            input.feed(&console);
            while read(&console, LSR) & 1 != 0 {
                arrived.push(read(&console, 0));
            }
            assert_eq!(is_woken(&console), arrived.len() < sent.len());
        }
        assert_eq!(arrived, sent);
    }

    // Bytes beyond 256 of a line waited for the next line, where the guest was slower
    // than the thread that brings input.
    #[test]
    fn data_that_a_driver_leaves_stays_a_cause() {
        let console = driven();
        input(b"hi").feed(&console);
        assert_eq!([cause(&console), cause(&console)], [4, 4]);
        assert_eq!(read(&console, 0), b'h');
        assert_eq!(cause(&console), 4);
        console.write(u64::from(IER), &[0]);
        assert_eq!(cause(&console), 1, "the driver doesn't want to know");
        console.write(u64::from(IER), &[IER_RECEIVED]);
        assert_eq!(read(&console, 0), b'i');
        assert_eq!(cause(&console), 1);
    }

    #[test]
    fn a_queue_has_an_end() {
        let mut input = input(&[]);
        input.enqueue(&[1; QUEUE_MAX - 1]);
        input.enqueue(&[2, 3]);
        assert_eq!(input.queue.len(), QUEUE_MAX);
        assert_eq!(input.queue.back(), Some(&2));
    }

    #[test]
    fn output_arrives_and_other_widths_do_nothing() {
        let (console, _, written) = console();
        console.write(0, b"o");
        console.write(0, b"no");
        console.write(0x100, b"n");
        console.write(0, &[]);
        console.write(0, b"k");
        assert_eq!(*written.0.lock().unwrap(), b"ok");
        let mut wide = [0xaa; 4];
        MmioDevice::read(&console, LSR, &mut wide);
        assert_eq!(wide, [0; 4]);
    }

    #[test]
    fn ctrl_a_x_is_found_in_pieces_too() {
        let guest = |bytes: &[u8]| Keys::Guest(bytes.to_vec());
        let rows: [(&str, &[&[u8]], Keys); 6] = [
            ("plain", &[b"abc"], guest(b"abc")),
            ("at once", &[b"ab\x01xcd"], Keys::Quit),
            ("in pieces", &[b"\x01", b"x"], Keys::Quit),
            ("twice is one", &[b"\x01\x01x"], guest(b"\x01x")),
            ("another key", &[b"\x01", b"b"], guest(b"\x01b")),
            ("held back", &[b"a\x01"], guest(b"a")),
        ];
        for (name, typed, last) in rows {
            let mut escape = Escape::default();
            let keys = typed.iter().map(|bytes| escape.take(bytes)).last();
            assert_eq!(keys, Some(last), "{name}");
        }
    }
}
