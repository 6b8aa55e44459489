//! The emulator: the one installed on the machine, or one that is unpacked from packages and run in place.
//!
//! Guests run without hardware support (TCG), because a CI machine is often a virtual machine itself. A boot takes some
//! seconds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::packages::Suite;
use super::{parts, programs};

const PROGRAM: &str = "qemu-system-x86_64";
const SUITE: &str = "bookworm";

/// How to start QEMU.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// The root folder of an unpacked emulator; `None` if the machine has one installed.
    root: Option<PathBuf>,
}

/// An NVMe drive with one namespace.
#[derive(Clone, Debug)]
pub struct Drive {
    /// The file with its blocks, followed by their metadata.
    pub file: PathBuf,
    /// Its serial number, by which guests find it.
    pub serial: String,
    /// Properties of the namespace, in QEMU's names.
    pub namespace: String,
}

/// The parts of a guest.
pub struct Machine<'a> {
    /// The image of the kernel.
    pub kernel: &'a Path,
    /// Its first file system.
    pub initrd: &'a Path,
    /// The file for the kernel's messages.
    pub console: &'a Path,
    /// Processors.
    pub processors: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Its drives.
    pub drives: &'a [Drive],
}

impl Qemu {
    /// The installed emulator, or one unpacked into `home`.
    ///
    /// # Errors
    /// [`super::packages::Unavailable`] if it is not installed and cannot be fetched.
    pub fn find(home: &Path) -> Result<Qemu> {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        if std::env::split_paths(&paths).any(|folder| folder.join(PROGRAM).is_file()) {
            return Ok(Qemu { root: None });
        }
        Qemu::unpacked(home)
    }

    /// An emulator unpacked into `home`, whether or not one is installed.
    ///
    /// # Errors
    /// [`super::packages::Unavailable`] if it cannot be fetched.
    pub fn unpacked(home: &Path) -> Result<Qemu> {
        let packages = ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];
        let part = parts::part(home, "qemu", &[&packages[..], &[SUITE]].concat(), |folder| {
            let suite = Suite::open(SUITE, home)?;
            suite.unpack(&suite.with_libraries(&packages)?, folder)?;
            fs::metadata(folder.join("usr/bin").join(PROGRAM)).context("looking for QEMU in its package")?;
            Ok(())
        })?;
        Ok(Qemu { root: Some(part) })
    }

    fn program(&self) -> Command {
        let Some(root) = &self.root else { return Command::new(PROGRAM) };
        let mut command = programs::loader(root);
        command.arg(root.join("usr/bin").join(PROGRAM));
        command.env("QEMU_MODULE_DIR", root.join("usr/lib/x86_64-linux-gnu/qemu"));
        for folder in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(root.join(folder));
        }
        command
    }

    /// The command that runs a machine. Its standard input and output are connected to the guest's agent.
    pub fn command(&self, machine: &Machine<'_>) -> Command {
        // Options that skip work which a kernel in an emulator does not need: probing hardware, mitigations,
        // self-tests, waiting.
        const KERNEL: &str = "console=ttyS0 loglevel=4 panic=-1 oops=panic mitigations=off nokaslr nopti no_timer_check \
            tsc=unstable clocksource=acpi_pm random.trust_cpu=on cryptomgr.notests rcupdate.rcu_expedited=1 net.ifnames=0 \
            raid=noautodetect rdinit=/init";
        let mut command = self.program();
        command.args(["-M", "q35,vmport=off,hpet=off", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "Westmere"]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(["-m", &machine.memory_mib.to_string(), "-smp", &machine.processors.to_string()]);
        command.arg("-kernel").arg(machine.kernel).arg("-initrd").arg(machine.initrd).args(["-append", KERNEL]);
        command.arg("-serial").arg(format!("file:{}", machine.console.display()));
        command.args(["-chardev", "stdio,id=agent,signal=off", "-device", "virtio-serial-pci"]);
        command.args(["-device", "virtserialport,chardev=agent,name=agent,nr=1"]);
        command.args(["-netdev", "user,id=net,ipv6=off", "-device", "virtio-net-pci,netdev=net,romfile="]);
        for (i, Drive { file, serial, namespace }) in machine.drives.iter().enumerate() {
            command.args(["-drive", &format!("file={},format=raw,if=none,id=file{i},discard=unmap", file.display())]);
            command.args(["-device", &format!("nvme,id=drive{i},serial={serial}")]);
            command.args(["-device", &format!("nvme-ns,drive=file{i},bus=drive{i},nsid=1,{namespace}")]);
        }
        command
    }
}
