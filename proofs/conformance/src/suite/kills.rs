//! Servers are killed again and again under hosts with mounted file systems; data that `fsync` acknowledged must be
//! there.
//!
//! One server serves two targets. The guest has ext4 on one and xfs on the other, and writes files all the time
//! (`conformance guest write-files`). The server is killed at a random moment and restarted; the host reconnects by
//! itself and continues. After each kill, every page of every file must have the acknowledged content, and further
//! calls of `fsync` must succeed. None of them may fail: acknowledged writes survive the death of the server's process,
//! so a flush has no loss to report. At the end the file systems are unmounted, checked, and mounted again on new
//! connections.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::context::{TestContext, expect};
use crate::served::Server;

/// The file systems; the name of each is also the name of its subsystem.
const FILE_SYSTEMS: [&str; 2] = ["ext4", "xfs"];
/// The host's retry options: it retries each second.
const OPTIONS: &str = "--reconnect-delay=1 --ctrl-loss-tmo=300";
/// The minimum and maximum time from when the host works again until the next kill.
const UNDER_LOAD_MS: std::ops::Range<u64> = 50..700;
/// One in this many kills is followed by a pause in which the host retries in vain.
const LONG_EVERY: u32 = 4;
const LONG: Duration = Duration::from_millis(1300);
/// The number of checks, one per pause, until a mirror has reconciled the blocks that were in flight at the kill.
const IN_SYNC_TRIES: u32 = 300;

/// The kind of target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Served {
    Volume,
    Mirror,
}

impl Served {
    /// The target of a file system.
    fn target(self, kind: &str) -> String {
        match self {
            Served::Volume => kind.to_owned(),
            Served::Mirror => format!("mirror:{kind}-a,{kind}-b"),
        }
    }

    /// Makes the devices of a target. xfs needs at least 300 MiB.
    fn create(self, context: &TestContext<'_>, kind: &str) -> Result<()> {
        let create = |name: &str| context.sealblock.create(name, "400MiB", &[]);
        match self {
            Served::Volume => create(kind),
            Served::Mirror => {
                let members = [format!("{kind}-a"), format!("{kind}-b")];
                members.iter().try_for_each(|name| create(name))?;
                context.sealblock.succeed(&["mirror", "create", &members[0], &members[1]]).map(drop)
            }
        }
    }
}

/// The writers' reports: acknowledged calls of `fsync` for each file system, and the number of files of both together.
struct Answers {
    acknowledged: Vec<u64>,
    files: u64,
}

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    for served in [Served::Volume, Served::Mirror] {
        one(context, served).with_context(|| format!("what is served: {served:?}"))?;
    }
    Ok(())
}

fn one(context: &mut TestContext<'_>, served: Served) -> Result<()> {
    let mut configuration = String::new();
    for kind in FILE_SYSTEMS {
        served.create(context, kind)?;
        let target = served.target(kind);
        configuration += &format!("[[subsystems]]\nname = \"{kind}\"\nnamespaces = [{{ target = \"{target}\" }}]\n");
    }
    context.sealblock.configure(&configuration)?;
    let mut server = context.sealblock.serve_configured()?;
    context.sh(&server, &script(MOUNT))?;
    let (first, mut random) = (answers(context, &server, "first")?, fastrand::Rng::with_seed(38));
    let (mut before, mut checked) = (first.acknowledged.clone(), 0);
    for kill in 1..=context.kills {
        thread::sleep(Duration::from_millis(random.u64(UNDER_LOAD_MS)));
        server.kill()?;
        if kill % LONG_EVERY == 0 {
            thread::sleep(LONG);
        }
        server.start()?;
        let now = answers(context, &server, &format!("{kill}")).with_context(|| format!("after kill {kill}"))?;
        if now.acknowledged.iter().zip(&before).any(|(now, before)| now <= before) {
            bail!("nothing was acknowledged since kill {kill}: {before:?} calls of fsync, {:?} now", now.acknowledged);
        }
        (before, checked) = (now.acknowledged, checked + now.files);
    }
    println!(
        "{}.{:<4} kills: {} of a server of {served:?}: {before:?} calls of fsync acknowledged on {FILE_SYSTEMS:?}, {checked} files checked",
        context.version.0, context.version.1, context.kills
    );
    context.sh(&server, &script(END)).with_context(|| format!("after {} kills, mounted again", context.kills))?;
    in_sync(context, served)?;
    server.stop()?;
    for kind in FILE_SYSTEMS {
        context.sealblock.succeed(&["verify", &served.target(kind)])?;
    }
    Ok(())
}

fn script(text: &str) -> String {
    text.replace("@OPTIONS@", OPTIONS)
}

/// Makes both writers check all their files, and returns their reports.
fn answers(context: &mut TestContext<'_>, server: &Server, question: &str) -> Result<Answers> {
    let said = context.sh(server, &CHECK.replace("@QUESTION@", question))?;
    let mut answers = Answers { acknowledged: Vec::new(), files: 0 };
    for line in said.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [asked, acknowledged, files] = words[..] else { bail!("a writer answers {line:?}") };
        expect("question that was answered", &asked, &question)?;
        answers.acknowledged.push(acknowledged.parse()?);
        answers.files += files.parse::<u64>()?;
    }
    expect("writers that answered", &answers.acknowledged.len(), &FILE_SYSTEMS.len())?;
    Ok(answers)
}

/// Waits until no replica is out of sync.
fn in_sync(context: &TestContext<'_>, served: Served) -> Result<()> {
    if served == Served::Volume {
        return Ok(());
    }
    for kind in FILE_SYSTEMS {
        let target = served.target(kind);
        let mut tries = 0;
        loop {
            let said = context.sealblock.run(&["mirror", "status", &target])?;
            if said.status.success() {
                break;
            }
            tries += 1;
            if tries > IN_SYNC_TRIES {
                bail!("{target} is not in sync: {}", String::from_utf8_lossy(&said.stdout));
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
    Ok(())
}

/// Makes and mounts the file systems, and starts a writer on each.
const MOUNT: &str = r#"
mark
for kind in ext4 xfs; do
  dev=$(attach $kind @OPTIONS@)
  case $kind in
    ext4) /usr/bin/mke2fs -q -F -t ext4 /dev/$dev ;;
    xfs) mkfs.xfs -q -f /dev/$dev ;;
  esac
  mkdir -p /mnt/$kind
  mount -t $kind -o discard /dev/$dev /mnt/$kind
  rm -f /tmp/$kind.*
  (
    conformance guest write-files /mnt/$kind /tmp/$kind 4711 && status=0 || status=$?
    # Complete as soon as it is there.
    echo $status >/tmp/$kind.ended
    mv /tmp/$kind.ended /tmp/$kind.status
  ) >/tmp/$kind.said 2>&1 &
done
"#;

/// Each writer checks all pages and reports. The test fails if a file system has reported an error of its device.
const CHECK: &str = r#"
for kind in ext4 xfs; do
  echo @QUESTION@ >/tmp/$kind.new
  mv /tmp/$kind.new /tmp/$kind.ask
done
for kind in ext4 xfs; do
  for try in $(seq 600); do
    [ -e /tmp/$kind.status ] && { cat /tmp/$kind.said; fail "the writer on $kind has ended"; }
    [ "$(cut -d ' ' -f 1 /tmp/$kind.answer 2>/dev/null)" = @QUESTION@ ] && break
    sleep 0.1
  done
  cat /tmp/$kind.answer
  grep -q " /mnt/$kind $kind rw," /proc/mounts || { grep /mnt/ /proc/mounts; fail "$kind is no longer writable"; }
done
said | grep -E 'EXT4-fs (error|warning)|XFS .*([Ee]rror|[Ss]hut|orrupt)|Buffer I/O error|lost (async|sync) page' >/tmp/faults &&
  { cat /tmp/faults; fail "a file system has found faults"; }
true
"#;

/// Stops the writers; all data must be there through new mounts on new connections, and the file systems must be
/// intact.
const END: &str = r#"
for kind in ext4 xfs; do
  echo end >/tmp/$kind.new
  mv /tmp/$kind.new /tmp/$kind.ask
done
for kind in ext4 xfs; do
  for try in $(seq 300); do
    [ -e /tmp/$kind.status ] && break
    sleep 0.1
  done
  [ "$(cat /tmp/$kind.status)" = 0 ] || { cat /tmp/$kind.said; fail "the writer on $kind"; }
  umount /mnt/$kind
  detach $kind
  dev=$(attach $kind)
  case $kind in
    ext4) e2fsck -f -n /dev/$dev ;;
    xfs) xfs_repair -n /dev/$dev ;;
  esac >/tmp/fsck 2>&1 || { cat /tmp/fsck; fail "$kind is damaged"; }
  mount -t $kind /dev/$dev /mnt/$kind
  conformance guest check-files /mnt/$kind /tmp/$kind.list || fail "$kind has lost something"
  umount /mnt/$kind
  detach $kind
done
"#;
