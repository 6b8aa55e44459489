//! Namespaces with visible protection information: through the block layer of kernels that support it over TCP, and
//! through passthrough on all kernels.

use anyhow::{Context, Result};

use crate::context::{TestContext, expect};
use crate::served::Server;

/// Volumes of 512 blocks for tests: name, block size, guard, type, and bytes of metadata.
const FORMATS: [(&str, &str, &str, &str, u32); 6] = [
    ("p512", "512", "crc16", "1", 8),
    ("p4096", "4096", "crc16", "1", 8),
    ("p4096-2", "4096", "crc16", "2", 8),
    ("p4096-3", "4096", "crc16", "3", 8),
    ("q4096", "4096", "crc64", "1", 16),
    ("q512-3", "512", "crc64", "3", 16),
];

/// Commands from fio through the generic device: fio makes the tags for its writes and checks those of its reads.
pub fn passthrough(context: &mut TestContext<'_>) -> Result<()> {
    let names = FORMATS.map(|(name, ..)| name);
    let mut server = served(context, &names)?;
    for (name, block, _, kind, metadata) in FORMATS {
        let script = filled(PASSTHROUGH, name, block, kind, metadata);
        context.sh(&server, &script).with_context(|| format!("format {name}"))?;
    }
    server.stop()?;
    names.iter().try_for_each(|name| context.sealblock.succeed(&["verify", name]).map(drop))?;
    damaged(context, &mut server)
}

/// The damage to each block, and the status of the check that fails.
const HARMS: [(u64, &str, &str); 4] = [
    (3, "data", "Guard"),
    (4, "guard", "Guard"),
    (100, "ref-tag", "Reference Tag"),
    (101, "app-tag", "Application Tag"),
];

/// Damage with visible tags: each block fails its check with the right status, and a host that reads all of them gets
/// as many errors.
fn damaged(context: &mut TestContext<'_>, server: &mut Server) -> Result<()> {
    let shown = FORMATS.iter().filter(|(name, ..)| ["p4096", "q512-3"].contains(name));
    for (name, ..) in shown.clone() {
        for (lba, kind, _) in HARMS {
            context.sealblock.succeed(&["corrupt", name, "--lba", &lba.to_string(), "--kind", kind])?;
        }
    }
    server.start()?;
    for (name, block, _, kind, metadata) in shown {
        let mut script = filled(DAMAGED, name, block, kind, *metadata);
        for (lba, _, status) in HARMS {
            script += &format!(
                "refused '{status} Check Error' nvme verify $char --namespace-id=1 --start-block={lba} --block-count=0 $checks \
                 --ref-tag={lba}\n"
            );
        }
        context.sh(server, &(script + "detach " + name)).with_context(|| format!("damaged format {name}"))?;
    }
    server.stop()
}

const DAMAGED: &str = r#"
dev=$(attach @NAME@)
char=/dev/ng${dev#nvme}
long=$((@BLOCK@ + @METADATA@))
checks="--prinfo=@PRINFO@ --app-tag=0x4321 --app-tag-mask=0xffff"
fio --name=damaged --filename=$char --ioengine=io_uring_cmd --cmd_type=nvme --size=$((512 * long)) --rw=read --bs=$long --thread=1 \
  --pi_act=0 --pi_chk=@CHECKS@ --apptag=0x4321 --apptag_mask=0xffff --continue_on_error=read --ignore_error=25218:25219:25220 --output-format=json \
  --output=/tmp/fio >/tmp/fio.said 2>&1 || true
grep -q '"total_err" : 4,' /tmp/fio || { grep _err /tmp/fio; cat /tmp/fio.said; fail "fio did not see 4 errors"; }
# Without PRCHK the target still answers for its own blocks: bad data are never handed out.
refused "Guard Check Error" nvme verify $char --namespace-id=1 --start-block=3 --block-count=0 --prinfo=0
nvme verify $char --namespace-id=1 --start-block=5 --block-count=94 --prinfo=4
"#;

/// The script for a format.
fn filled(script: &str, name: &str, block: &str, kind: &str, metadata: u32) -> String {
    let (checks, prinfo) = if kind == "3" { ("GUARD,APPTAG", "6") } else { ("GUARD,REFTAG,APPTAG", "7") };
    script
        .replace("@NAME@", name)
        .replace("@BLOCK@", block)
        .replace("@METADATA@", &metadata.to_string())
        .replace("@CHECKS@", checks)
        .replace("@PRINFO@", prinfo)
}

fn served(context: &TestContext<'_>, names: &[&str]) -> Result<Server> {
    for (name, block, guard, kind, _) in FORMATS.iter().filter(|format| names.contains(&format.0)) {
        let options = ["--block-size", block, "--guard", guard, "--type", kind];
        context.sealblock.create(name, "8MiB", &options)?;
    }
    context.sealblock.serve(names, &["--protection", "shown"])
}

/// With PRACT set, the target makes and strips the tags. Without it they are transferred, and a wrong tag is refused.
/// Combined, one side makes the tags and the other checks them.
const PASSTHROUGH: &str = r#"
dev=$(attach @NAME@)
char=/dev/ng${dev#nvme}
long=$((@BLOCK@ + @METADATA@))
cat >/tmp/jobs <<END
[global]
filename=$char
ioengine=io_uring_cmd
cmd_type=nvme
iodepth=8
size=$((512 * @BLOCK@))
thread=1
md_per_io_size=0
pi_chk=@CHECKS@
apptag_mask=0xffff
stonewall=1
[tags of the host, written]
rw=randwrite
bs=$long
size=$((512 * long))
pi_act=0
apptag=0x1234
[tags of the host, read]
rw=randread
bs=$long
size=$((512 * long))
pi_act=0
apptag=0x1234
[tags of the host, checked by the target only]
rw=read
bs=@BLOCK@
pi_act=1
apptag=0x1234
[tags of the target, written]
rw=randwrite
bs=@BLOCK@
pi_act=1
apptag=0x4321
[tags of the target, read]
rw=randread
bs=@BLOCK@
pi_act=1
apptag=0x4321
[tags of the target, checked by the host]
rw=read
bs=$long
size=$((512 * long))
pi_act=0
apptag=0x4321
END
fio --output=/tmp/fio /tmp/jobs >/tmp/fio.said 2>&1 || { cat /tmp/fio.said /tmp/fio; fail "tags"; }
if fio --name=wrong --filename=$char --ioengine=io_uring_cmd --cmd_type=nvme --size=$((512 * @BLOCK@)) --rw=read \
  --bs=@BLOCK@ --pi_act=1 --pi_chk=APPTAG --apptag=0x1111 --apptag_mask=0xffff --output=/tmp/fio >/tmp/fio.said 2>&1; then
  fail "a wrong application tag was not refused"
fi
# A block with its tags, and then with one wrong bit: in the data, the guard, the application and the reference tag.
ask() { command=$1; shift; rm -f /tmp/back; nvme $command $char --namespace-id=1 --start-block=9 --block-count=0 "$@"; }
ask read --data-size=$long --data=/tmp/back --prinfo=4
cp /tmp/back /tmp/block
flipped() {
  cp /tmp/block /tmp/wrong
  byte=$(dd if=/tmp/block bs=1 skip=$1 count=1 status=none | od -A n -t u1)
  printf "\\$(printf %03o $((byte ^ 1)))" | dd of=/tmp/wrong bs=1 seek=$1 conv=notrunc status=none
}
send="ask write --data-size=$long --data=/tmp/wrong --ref-tag=9 --app-tag=0x4321 --app-tag-mask=0xffff"
guard=$((@METADATA@ == 8 ? 2 : 8))
flipped 17
refused "Guard Check Error" $send --prinfo=4
flipped @BLOCK@
refused "Guard Check Error" $send --prinfo=@PRINFO@
flipped $((@BLOCK@ + guard))
refused "Application Tag Check Error" $send --prinfo=@PRINFO@
if [ @PRINFO@ = 7 ]; then
  flipped $((long - 1))
  refused "Reference Tag Check Error" $send --prinfo=7
fi
ask read --data-size=$long --data=/tmp/back --prinfo=@PRINFO@ --ref-tag=9 --app-tag=0x4321 --app-tag-mask=0xffff
cmp /tmp/block /tmp/back || fail "a write that was refused changed the block"
nvme verify $char --namespace-id=1 --start-block=0 --block-count=511 --prinfo=4
detach @NAME@
"#;

/// The block layer of kernels that support such namespaces over TCP: it makes the target generate and check the tags.
pub fn block_layer(context: &mut TestContext<'_>) -> Result<()> {
    let names = ["p512", "p4096", "p4096-2", "p4096-3"];
    let mut server = served(context, &names)?;
    for name in names {
        context.sh(&server, &BLOCK_LAYER.replace("@NAME@", name)).with_context(|| format!("format {name}"))?;
    }
    server.stop()?;
    for name in names {
        context.sealblock.succeed(&["verify", name])?;
        for (lba, kind) in [(5, "data"), (9, "guard"), (70, "ref-tag")] {
            context.sealblock.succeed(&["corrupt", name, "--lba", &lba.to_string(), "--kind", kind])?;
        }
    }
    server.start()?;
    for name in names {
        let scan =
            "dev=$(attach @NAME@); conformance guest scan /dev/$dev $(cat /sys/block/$dev/queue/logical_block_size)";
        let said = context.sh(&server, &scan.replace("@NAME@", name))?;
        let bad: Vec<&str> = said.lines().filter(|line| !line.starts_with("blocks")).collect();
        // EILSEQ: the kernel's error for failed checks.
        expect("blocks that fail, and how", &bad, &vec!["5 84", "9 84", "70 84"])?;
        context.sh(&server, &format!("detach {name}"))?;
    }
    server.stop()
}

const BLOCK_LAYER: &str = r#"
dev=$(attach @NAME@)
[ "$(cat /sys/block/$dev/size)" = $((8 * 2048)) ] || fail "the size is $(cat /sys/block/$dev/size)"
cat /sys/block/$dev/integrity/format
/usr/bin/mke2fs -q -F -t ext4 /dev/$dev
mkdir -p /mnt/@NAME@
mount /dev/$dev /mnt/@NAME@
cp /usr/bin/nvme /mnt/@NAME@
umount /mnt/@NAME@
e2fsck -f -n /dev/$dev
fio --name=random --filename=/dev/$dev --direct=1 --ioengine=libaio --iodepth=32 --rw=randwrite --bs=4k --size=4m \
  --verify=crc32c --verify_fatal=1 --output=/tmp/fio || { cat /tmp/fio; fail "random writes"; }
conformance guest fill /dev/$dev 5
conformance guest check /dev/$dev 5
detach @NAME@
"#;
