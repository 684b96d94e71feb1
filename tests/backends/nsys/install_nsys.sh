#!/usr/bin/env bash
# Unpack the real nsys 2023.4 into a folder, for the tests: bash install_nsys.sh DIR; then PATH=DIR/root/usr/bin:$PATH
#
# It is a package of Debian trixie's component non-free. NVIDIA's licence holds for it: use it for tests on this machine
# and put it nowhere else. No root is needed; apt's own sources, lists and packages stay as they are. Where it cannot be
# had, the reason is printed and the exit status is 0: the tests that need nsys are skipped then, and say so.
set -u

if [ $# -ne 1 ]; then
  echo "usage: install_nsys.sh DIR" >&2
  exit 2
fi
mkdir -p "$1" && DIR=$(cd "$1" && pwd) || exit 2
LOG=$DIR/install.log
NSYS=$DIR/root/usr/bin/nsys
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

give_up() {
  echo "nsys was not installed: $*" >&2
  if [ -s "$LOG" ]; then tail -n 5 "$LOG" >&2; fi
  exit 0
}

version() { timeout 20 "$NSYS" --version </dev/null 2>>"$LOG"; }

# apt with lists and cache of its own; $1 names them, so that two sets of sources do not mix.
own_apt() {
  local state=$DIR/apt-$1
  shift
  mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
  timeout 600 apt-get -o Dir::State::Lists="$state/lists" -o Dir::Cache="$state/cache" -o APT::Sandbox::User=root \
    -o Acquire::Retries=3 -qq "$@" </dev/null >>"$LOG" 2>&1
}

trixie() {
  own_apt trixie -o Dir::Etc::SourceList="$DIR/trixie.list" -o Dir::Etc::SourceParts=- "$@"
}

: >"$LOG" || give_up "$DIR cannot be written"
if [ -x "$NSYS" ] && version; then exit 0; fi

for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || give_up "there is no $tool here; this script works on Debian"
done
[ "$(dpkg --print-architecture)" = amd64 ] || give_up "the package is for amd64"
[ -e "$KEYRING" ] || give_up "$KEYRING is missing, so Debian's packages cannot be checked"
# The mirror that this machine uses, whatever it is called here.
MIRROR=$(apt-get indextargets --format '$(REPO_URI)' 2>>"$LOG" | grep -v security | head -n 1)
echo "deb [signed-by=$KEYRING] ${MIRROR:-http://deb.debian.org/debian} trixie non-free" >"$DIR/trixie.list"

trixie update || give_up "the package list of ${MIRROR:-deb.debian.org} cannot be had"
mkdir -p "$DIR/debs" && cd "$DIR/debs" || give_up "$DIR cannot be written"
trixie download nsight-systems nsight-systems-target || give_up "the mirror has no nsight-systems in trixie non-free"
# Its importer wants libssh at a place beside it. Small images lack libssh: then it is unpacked there, of this system's
# version.
LIB=$DIR/root/usr/lib
SSH=$(ldconfig -p | sed -n 's/.*libssh\.so\.4 .*=> //p' | head -n 1)
if [ -z "$SSH" ]; then
  own_apt system update
  own_apt system download libssh-4 || give_up "libssh-4 cannot be had"
fi
for package in *.deb; do
  dpkg-deb -x "$package" "$DIR/root" || give_up "$package cannot be unpacked (is the disk full?)"
done

[ -z "$SSH" ] || ln -sfn "$SSH" "$LIB/x86_64-linux-gnu/libssh.so.4"
HOST=$LIB/nsight-systems/host-linux-x64
TARGET=$LIB/x86_64-linux-gnu/nsight-systems/target-linux-x64
# Without the host's folder beside the target's, nsys leaves raw data and makes no report of it.
ln -sfn "$HOST" "$LIB/x86_64-linux-gnu/nsight-systems/host-linux-x64"
# The host's copy is a link to nowhere, and `nsys stats` needs it.
if [ ! -e "$HOST/python/lib/nsysstats.py" ] && [ -e "$TARGET/python/lib/nsysstats.py" ]; then
  rm -f "$HOST/python/lib/nsysstats.py"
  cp "$TARGET/python/lib/nsysstats.py" "$HOST/python/lib/"
fi
cd "$DIR" && rm -rf "$DIR/debs" "$DIR/apt-trixie" "$DIR/apt-system" "$DIR/root/usr/share/doc"
version || give_up "it does not start: $(ldd "$TARGET/nsys" 2>/dev/null | grep 'not found' | head -n 3 | xargs)"
