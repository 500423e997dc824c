// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM that doesn't remove what it adds.

use std::sync::Mutex;

use super::*;

/// How a VMM answers a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removal {
    /// As KVM does when the value is the one that was added.
    Works,
    /// As KVM does without a value.
    Fails,
    /// It removes nothing, and doesn't report that.
    IsIgnored,
}

#[derive(Debug)]
struct FakeVm {
    removal: Removal,
    connected: Mutex<Vec<(u64, Option<u32>)>>,
}

impl FakeVm {
    fn new(removal: Removal) -> Arc<Self> {
        let connected = Mutex::default();
        Arc::new(Self { removal, connected })
    }

    fn connected(&self) -> usize {
        self.connected.lock().unwrap().len()
    }
}

impl KvmVm for FakeVm {
    fn map(&self, _: MemorySlot) -> io::Result<()> {
        Ok(())
    }

    fn unmap(&self, _: MemorySlot) -> io::Result<()> {
        Ok(())
    }

    fn add_ioeventfd(&self, ioeventfd: IoEventFd<'_>) -> io::Result<()> {
        let mut connected = self.connected.lock().unwrap();
        let what = (ioeventfd.address, ioeventfd.value);
        if connected.contains(&what) {
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        connected.push(what);
        Ok(())
    }

    fn remove_ioeventfd(&self, ioeventfd: IoEventFd<'_>) -> io::Result<()> {
        let what = (ioeventfd.address, ioeventfd.value);
        match self.removal {
            Removal::Works => self.connected.lock().unwrap().retain(|one| *one != what),
            Removal::Fails => return Err(io::Error::from_raw_os_error(libc::ENOENT)),
            Removal::IsIgnored => {}
        }
        Ok(())
    }
}

fn offload() -> Arc<KvmOffload> {
    let event = || Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
    let bell = |khz| Doorbell::of_set_perf(VcpuId(0), Some(khz), event());
    Arc::new(KvmOffload {
        base: 0x0a00_0000,
        pages: None,
        doorbells: [bell(600_000), bell(1_800_000)].into(),
        lost: event(),
        all_or_nothing: true,
        state: Arc::default(),
    })
}

/// The doorbells that are connected, and the warnings.
fn attached(vm: &Arc<FakeVm>) -> (Attachment, Arc<KvmOffload>, Arc<Mutex<Vec<String>>>) {
    let (offload, said) = (offload(), Arc::new(Mutex::new(Vec::new())));
    let warnings = said.clone();
    let attachment = Attachment::new(
        vm.clone(),
        Some(&offload),
        Box::new(|_, _| None),
        Box::new(move |text| warnings.lock().unwrap().push(text.to_owned())),
    );
    (attachment, offload, said)
}

#[test]
fn a_vmm_that_removes_gets_doorbells() {
    let vm = FakeVm::new(Removal::Works);
    let (attachment, offload, said) = attached(&vm);
    assert_eq!((vm.connected(), offload.state.writes()), (2, true));
    assert!(attachment.detach().is_ok());
    assert_eq!(vm.connected(), 0);
    assert!(said.lock().unwrap().is_empty());
}

#[test]
fn one_that_does_not_gets_none() {
    for removal in [Removal::Fails, Removal::IsIgnored] {
        let vm = FakeVm::new(removal);
        let (attachment, offload, said) = attached(&vm);
        assert!(!offload.state.writes(), "{removal:?}");
        // A value of a register that no guest writes.
        assert_eq!(
            *vm.connected.lock().unwrap(),
            [(0x0a00_0000, Some(u32::MAX))]
        );
        assert_eq!(said.lock().unwrap().len(), 1, "{removal:?}");
        assert_eq!(offload.lost.read().unwrap(), 1, "{removal:?}");
        assert!(attachment.detach().is_ok());
    }
}

#[test]
fn without_a_watch_all_accesses_exit() {
    let vm = FakeVm::new(Removal::Works);
    let (mut attachment, offload, _) = attached(&vm);
    attachment.give_up();
    assert!(attachment.lost().is_none());
    assert_eq!((vm.connected(), offload.state.writes()), (0, false));
}

#[test]
fn a_watch_detaches_what_is_lost() {
    let vm = FakeVm::new(Removal::Works);
    let (attachment, offload, _) = attached(&vm);
    offload.lost.write(1).unwrap();
    attachment.watch().unwrap().join().unwrap();
    assert_eq!((vm.connected(), offload.state.writes()), (0, false));
}

/// It worked when it was tried.
#[test]
fn what_is_kept_is_an_error() {
    let vm = Arc::new(FakeVm {
        removal: Removal::Works,
        connected: Mutex::default(),
    });
    let (mut attachment, _, _) = attached(&vm);
    let fails = FakeVm::new(Removal::Fails);
    attachment.attached.as_mut().unwrap().vm = fails;
    let kept = attachment.detach().unwrap_err();
    assert!(matches!(kept, DetachError::Doorbells { doorbells: 2 }));
}
