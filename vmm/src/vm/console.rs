// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's console: a 16550 on the bus, this process's terminal or pipes
//! at the other end.
//!
//! Output goes out byte by byte, as the guest writes it. Input is held back
//! until the guest's driver has turned the receive interrupt on and the FIFO
//! has room, so that nothing which a script sends early is lost.

use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_superio::Trigger;
use vm_superio::serial::{Serial, SerialEvents};
use vmm_sys_util::eventfd::EventFd;

use super::bus::MmioDevice;
use super::sys;

/// Interrupt enable register, and its bit for received data.
const IER: u8 = 1;
const IER_RECEIVED: u8 = 1;
/// Line control register, and its bit that puts the divisor in IER's place.
const LCR: u8 = 3;
const LCR_DIVISOR: u8 = 0x80;

/// Raises the console's interrupt.
struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Says that the guest can take input again.
struct Room(Arc<EventFd>);

impl SerialEvents for Room {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        // Fails when the counter is full only, and then it is readable anyway.
        let _ = self.0.write(1);
    }
}

/// Where the guest's output goes.
pub type Output = Box<dyn Write + Send>;

/// The console on the bus.
pub struct Console {
    serial: Mutex<Serial<Interrupt, Room, Output>>,
    room: Arc<EventFd>,
}

impl Console {
    /// A console that writes to `output` and raises its interrupt through
    /// `interrupt`.
    pub fn new(interrupt: EventFd, output: Output) -> io::Result<Self> {
        let room = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        let serial = Serial::with_events(Interrupt(interrupt), Room(room.clone()), output);
        Ok(Self {
            serial: Mutex::new(serial),
            room,
        })
    }

    /// How many bytes of input the guest can take now.
    pub fn room(&self) -> usize {
        let mut serial = self.lock();
        let divisor = serial.read(LCR) & LCR_DIVISOR != 0;
        if divisor || serial.read(IER) & IER_RECEIVED == 0 {
            return 0;
        }
        serial.fifo_capacity()
    }

    /// Readable when there may be room again.
    pub fn room_event(&self) -> &EventFd {
        &self.room
    }

    /// Gives the guest `input`, of which at most [`Self::room`] bytes fit.
    pub fn feed(&self, input: &[u8]) {
        // The guest may have closed the port since it was asked for room; a
        // real line loses such bytes too.
        let _ = self.lock().enqueue_raw_bytes(input);
    }

    fn lock(&self) -> MutexGuard<'_, Serial<Interrupt, Room, Output>> {
        // The registers are valid after a panic too.
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MmioDevice for Console {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (Ok(offset), [byte]) = (u8::try_from(offset), data) {
            *byte = self.lock().read(offset);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (Ok(offset), [byte]) = (u8::try_from(offset), data) {
            // Output that can't be written (a closed pipe) is lost, as on a
            // real line.
            let _ = self.lock().write(offset, *byte);
            if offset == IER && byte & IER_RECEIVED != 0 {
                // As above, for an eventfd.
                let _ = self.room.write(1);
            }
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

/// Standard input on its way to the guest.
pub struct Input {
    terminal: Option<RawTerminal>,
    escape: Escape,
    open: bool,
}

impl Input {
    /// Takes standard input, its terminal into raw mode if it is one.
    ///
    /// A terminal that belongs to another job is left alone: reading from it
    /// would stop this one.
    pub fn open() -> io::Result<Self> {
        let stdin = io::stdin();
        let (terminal, open) = match sys::terminal_settings(stdin.as_fd()) {
            Ok(_) if !sys::in_foreground(stdin.as_fd()) => (None, false),
            Ok(settings) => (Some(RawTerminal::enter(settings)?), true),
            Err(_) => (None, true),
        };
        Ok(Self {
            terminal,
            escape: Escape::default(),
            open,
        })
    }

    /// The descriptor to wait for, while there is more to come.
    pub fn source(&self, stdin: &io::Stdin) -> Option<RawFd> {
        self.open.then(|| stdin.as_raw_fd())
    }

    /// Moves what is there to the guest, as much as `console` has room for.
    /// Returns true when Ctrl-A x was typed.
    pub fn forward(&mut self, console: &Console, stdin: &io::Stdin) -> bool {
        // A held-back Ctrl-A makes two bytes of the next one.
        let room = console.room().saturating_sub(1).min(64);
        let mut buffer = [0; 64];
        if room == 0 {
            return false;
        }
        match sys::read(stdin.as_fd(), &mut buffer[..room]) {
            Ok(0) => self.open = false,
            Ok(len) if self.terminal.is_some() => match self.escape.take(&buffer[..len]) {
                Keys::Guest(bytes) => console.feed(&bytes),
                Keys::Quit => return true,
            },
            Ok(len) => console.feed(&buffer[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.open = false,
        }
        false
    }
}

/// A terminal in raw mode, until dropped or until the process crashes.
struct RawTerminal {
    settings: libc::termios,
    _crash: sys::RestoreOnCrash,
}

impl RawTerminal {
    fn enter(settings: libc::termios) -> io::Result<Self> {
        let stdin = io::stdin();
        let crash = sys::RestoreOnCrash::arm(stdin.as_fd(), settings)?;
        sys::set_terminal(stdin.as_fd(), &sys::raw_settings(&settings))?;
        Ok(Self {
            settings,
            _crash: crash,
        })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // A terminal that has gone away needs no settings.
        let _ = sys::set_terminal(io::stdin().as_fd(), &self.settings);
    }
}
