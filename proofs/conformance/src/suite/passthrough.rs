//! Namespaces of a `sealblock serve`, used by a `sealblock` in the guest as if they were local drives: through the
//! kernel's NVMe/TCP host and its passthrough. The target supports two commands that QEMU's drives do not: Get LBA
//! Status, and Write Zeroes with deallocation. The target can also disappear, and be slower than the kernel's timeout.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::zeroes::gives_back;
use crate::context::{OwnGuestContext, expect, quiet, succeed};
use crate::harness::Guest;
use crate::served::Server;

const BLOCKS: u64 = 16_384;
/// Requests to these blocks take longer than the kernel's command timeout of 30 s.
const SLOW: &str = "fault:[delay=100s@10000..10010],v";

pub fn run(context: &OwnGuestContext<'_>) -> Result<()> {
    context.sealblock.create("v", "64MiB", &[])?;
    let mut guest = context.boot(Vec::new(), 1)?;
    whole(context, &mut guest).context("a volume that is whole")?;
    damaged(context, &mut guest).context("a damaged volume")?;
    unreadable(context, &mut guest).context("a target with blocks that cannot be read")?;
    aborting(context, &mut guest).context("a target that refuses commands which it says that it has")?;
    vanishes(context, &mut guest).context("a target that vanishes during a verify")?;
    slow(context, &mut guest).context("a target that is slower than the kernel waits")?;
    quiet(&mut guest)
}

fn sh(guest: &mut Guest, server: &Server, script: &str) -> Result<String> {
    succeed(guest, &format!("PORT={}\nset -e\n{script}", server.port))
}

/// The status and the output of a verify by the target.
struct Verified {
    status: i64,
    said: Value,
    complaint: String,
}

const VERIFY: &str = r#"
verify() {
  status=0
  sealblock verify /dev/$(attached v) --mode offload --json >/tmp/json 2>/tmp/complaint || status=$?
  echo $status >/tmp/status
}
"#;

/// Reads the files that the function `verify` leaves.
fn verified(guest: &mut Guest, server: &Server) -> Result<Verified> {
    let said = sh(guest, server, "cat /tmp/status /tmp/json; echo; echo ====; cat /tmp/complaint")?;
    let (status, rest) = said.split_once('\n').context("no status")?;
    let (json, complaint) = rest.split_once("====").context("no complaint")?;
    let json = json.trim();
    let said = match json.is_empty() {
        true => Value::Null,
        false => serde_json::from_str(json).with_context(|| format!("reading what verify said: {json}"))?,
    };
    Ok(Verified { status: status.parse()?, said, complaint: complaint.trim().to_owned() })
}

/// Runs a verify, which must report exactly these blocks, without transferring data.
fn names(guest: &mut Guest, server: &Server, wanted: &[(u64, &str)]) -> Result<()> {
    sh(guest, server, &format!("{VERIFY}\nverify"))?;
    let Verified { status, said, complaint } = verified(guest, server)?;
    expect(&format!("exit status ({complaint})"), &status, &i64::from(!wanted.is_empty()))?;
    expect("offloaded", &said["offloaded"].as_bool(), &Some(true))?;
    expect("bytes transferred", &said["bytes_transferred"].as_u64(), &Some(0))?;
    expect("blocks verified", &said["blocks_verified"].as_u64(), &Some(BLOCKS))?;
    let errors = said["errors"].as_array().context("verify lists no errors")?;
    let named: Vec<(u64, &str)> =
        errors.iter().filter_map(|error| Some((error["lba"].as_u64()?, error["field"].as_str()?))).collect();
    expect("blocks that verify names", &named.as_slice(), &wanted)
}

/// Writes, verifies by the target, zeroes with deallocation, and copies within the namespace.
fn whole(context: &OwnGuestContext<'_>, guest: &mut Guest) -> Result<()> {
    let mut server = context.sealblock.serve(&["v"], &[])?;
    let script = r#"
        dev=/dev/$(attach v)
        sealblock info $dev --json >/tmp/json
        for wanted in '"passthrough": *true' '"get_lba_status": *true' '"unmap_zeroes": *true' '"verify": *"native"' \
          '"copy": *"native"' '"write_zeroes": *"native"'; do
          grep -q "$wanted" /tmp/json || { cat /tmp/json; fail "info does not say $wanted"; }
        done
        random 67108864 >/tmp/data
        sealblock copy /tmp/data $dev
        sealblock compare $dev /tmp/data
        flush ${dev#/dev/}
        "#;
    sh(guest, &server, script)?;
    names(guest, &server, &[])?;
    let before = context.sealblock.allocated_bytes("v")?;
    let script = r#"
        dev=/dev/$(attached v)
        sealblock zero $dev --range 4096..6143
        dd if=/dev/zero of=/tmp/data bs=4096 seek=4096 count=2048 conv=notrunc status=none
        sealblock compare $dev /tmp/data
        flush ${dev#/dev/}
        "#;
    sh(guest, &server, script)?;
    gives_back(&context.sealblock, "sealblock zero", before)?;
    names(guest, &server, &[])?;
    sh(guest, &server, "detach v")?;
    server.stop()
}

/// Exactly the damaged blocks are reported: first when the verify searches for them, and again when the target lists
/// them by Get LBA Status.
fn damaged(context: &OwnGuestContext<'_>, guest: &mut Guest) -> Result<()> {
    let wanted: Vec<(u64, &str)> = [0, 66, 67, 9000, BLOCKS - 1].into_iter().map(|lba| (lba, "guard")).collect();
    for (lba, _) in &wanted {
        context.sealblock.succeed(&["corrupt", "v", "--lba", &lba.to_string(), "--kind", "data"])?;
    }
    let mut server = context.sealblock.serve(&["v"], &[])?;
    sh(guest, &server, "attach v")?;
    for _ in 0..2 {
        names(guest, &server, &wanted)?;
    }
    // Rewriting them repairs them. The command needs the option that permits overwriting a volume, because the damage
    // hides whether there is one.
    let script = r#"
        dev=/dev/$(attached v)
        refused "--force" sealblock copy /tmp/data $dev
        sealblock copy /tmp/data $dev --force
        sealblock compare $dev /tmp/data
        "#;
    sh(guest, &server, script)?;
    names(guest, &server, &[])?;
    sh(guest, &server, "detach v")?;
    server.stop()
}

/// A Verify fails because the target's device cannot read.
fn unreadable(context: &OwnGuestContext<'_>, guest: &mut Guest) -> Result<()> {
    let mut server = context.sealblock.serve(&["fault:[read-error@500..502],v"], &[])?;
    sh(guest, &server, "attach v")?;
    names(guest, &server, &[(500, "media"), (501, "media"), (502, "media")])?;
    sh(guest, &server, "detach v")?;
    server.stop()
}

/// If the target aborts every Verify, this is detected when the drive is opened: blocks are read instead, with a note.
/// If it aborts Verify only later, that is an error that names the refused command; the program does not silently read
/// instead. The same holds for Write Zeroes.
fn aborting(context: &OwnGuestContext<'_>, guest: &mut Guest) -> Result<()> {
    let mut server = context.sealblock.serve(&["fault:[abort-verify],v"], &[])?;
    let script = r#"
        dev=/dev/$(attach v)
        sealblock info $dev --json >/tmp/json
        grep -q '"verify": *"emulated"' /tmp/json || { cat /tmp/json; fail "a Verify that is refused is not emulated"; }
        grep -q 'verify: the drive says that it has it, and answered Invalid Command Opcode' /tmp/json ||
          { cat /tmp/json; fail "info does not say why"; }
        sealblock verify $dev --json >/tmp/json
        grep -q '"offloaded": *false' /tmp/json && grep -q '"bytes_transferred": *67108864' /tmp/json ||
          { cat /tmp/json; fail "it was not read"; }
        refused "does not support verification" sealblock verify $dev --mode offload
        detach v
        "#;
    sh(guest, &server, script)?;
    server.stop()?;
    let mut server = context.sealblock.serve(&["fault:[abort-verify@9000;abort-write-zeroes@9000..9001],v"], &[])?;
    let script = format!(
        r#"
        {VERIFY}
        dev=/dev/$(attach v)
        verify
        read_before=$(awk '{{print $3}}' /sys/block/${{dev#/dev/}}/stat)
        for mode in auto offload; do
          status=0
          sealblock verify $dev --mode $mode --quiet 2>/tmp/other || status=$?
          [ $status = 3 ] || {{ cat /tmp/other; fail "verify --mode $mode ended with $status"; }}
          grep -q 'does not support verify' /tmp/other || {{ cat /tmp/other; fail "it does not say what was refused"; }}
        done
        moved=$(($(awk '{{print $3}}' /sys/block/${{dev#/dev/}}/stat) - read_before))
        [ $moved -lt 16384 ] || fail "$moved sectors were read instead"
        sealblock verify $dev --range 0..8000 --mode offload --quiet
        sealblock zero $dev --range 100..107
        refused "does not support write zeroes" sealblock zero $dev --range 8999..9001
        sealblock verify $dev --mode emulate --quiet
        detach v
        "#
    );
    sh(guest, &server, &script)?;
    let Verified { status, complaint, .. } = verified(guest, &server)?;
    expect(&format!("exit status ({complaint})"), &status, &3)?;
    expect("the complaint names the command", &complaint.contains("does not support verify"), &true)?;
    server.stop()
}

/// Exits with status 3 and reports that the device is unreachable.
fn fails(guest: &mut Guest, server: &Server) -> Result<()> {
    let Verified { status, said, complaint } = verified(guest, server)?;
    expect(&format!("exit status ({complaint}; {said})"), &status, &3)?;
    if said != Value::Null || !complaint.contains("cannot be reached") {
        bail!("a verify that failed said {said} and complained: {complaint}");
    }
    Ok(())
}

/// The server dies during a verify.
fn vanishes(context: &OwnGuestContext<'_>, guest: &mut Guest) -> Result<()> {
    let mut server = context.sealblock.serve(&[SLOW], &[])?;
    sh(guest, &server, &format!("attach v --reconnect-delay=1\n{VERIFY}\nrm /tmp/status\nverify &"))?;
    thread::sleep(Duration::from_secs(5));
    server.kill()?;
    sh(guest, &server, "for try in $(seq 600); do [ -s /tmp/status ] && exit 0; sleep 0.1; done; fail 'it hangs'")?;
    fails(guest, &server)?;
    // Linux 6.1 waits a minute for a reply to each attempt to reconnect, and disconnects only after that.
    sh(guest, &server, "detach v").map(drop)
}

/// The kernel times a command out after 30 s.
fn slow(context: &OwnGuestContext<'_>, guest: &mut Guest) -> Result<()> {
    let mut server = context.sealblock.serve(&[SLOW], &[])?;
    sh(guest, &server, "attach v")?;
    let begun = Instant::now();
    sh(guest, &server, &format!("{VERIFY}\nverify"))?;
    fails(guest, &server)?;
    let took = begun.elapsed();
    expect(
        &format!("{took:?} are the kernel's patience, and less than the target's"),
        &(took < Duration::from_secs(95)),
        &true,
    )?;
    server.kill()?;
    sh(guest, &server, "detach v").map(drop)
}
