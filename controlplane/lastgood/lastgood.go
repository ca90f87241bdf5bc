// Package lastgood keeps on disk what a node last knew of the mesh, so that it serves
// after a start at which nobody can be asked.
//
//   - A file is whole or it is none: it is written beside the old one, synced, and
//     renamed; version, length and SHA-256 are verified before a byte of it is used.
//   - What cannot be used is set aside under a name that says why, and never trusted.
//   - No secret is in it. Of this node's own pods there is what files said, which only
//     the file source looks at. Mode 0600.
//
// It makes no rule of what becomes of a State.
package lastgood

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"aether/controlplane/input"
	"aether/dataplane/model"
)

// State is what is kept. Nothing in it may be changed after it was given to Save.
type State struct {
	// Whose view it is: that of another node, or of another mesh, is not taken.
	Node, Domain, TrustDomain string
	Sources                   []Source
	Kept                      []Kept
}

// Kept is a service without rows that is kept against its removal (contract 4.12).
type Kept struct {
	Service model.ServiceName
	Ports   []uint16
	Left    time.Duration // how much longer, of when the state was saved
}

// Source is what one source said.
type Source struct {
	Name string
	// At is when it was last known to be true.
	At time.Time
	// Mesh has the lists of objects alone. Its Workloads are this node's pods: they are for the source that said them, which
	// looks among them for what is in a file of which not all can be read.
	Mesh     model.Mesh
	Settings *input.Settings // nil: it said nothing of them
	Locality *input.Locality // nil: it said nothing of it
	// Namespaces are the settings of pods by their namespace.
	Namespaces map[string][]input.Override
	// Stayed are the objects that could not be read any more and stayed as they were.
	Stayed []Stayed
}

// Stayed is an object that stayed as it was, and since when.
type Stayed struct {
	Object string // "Pod shop/cart-1"
	Since  time.Time
}

// The header: magic, version, length of the body, and its SHA-256. A sum of 32 bits would
// find nearly all damage, and one file in four billion is trusted wrongly; the whole sum
// costs milliseconds.
const (
	magic      = "aether last good state\r\n\x00" // a text-mode copy shows at once
	version    = 1                                // raised when the same bytes mean something else
	headerSize = len(magic) + 4 + 8 + sha256.Size
)

// Bounds of the files.
const (
	maxFile  = 512 << 20        // bytes that are read or written
	maxAside = 4                // files set aside that are kept, newest first
	oldTemp  = 10 * time.Minute // a file being written that is older is a crash's
)

// File is where a State is kept. Its methods are not for concurrent use.
type File struct{ path string }

// New makes a File of that path; nothing is opened.
func New(path string) *File { return &File{path} }

// Path is where it is.
func (f *File) Path() string { return f.path }

// ErrNone says that there is no file.
var ErrNone = errors.New("there is no last good state yet")

// Aside says that a file was there and cannot be used, why, and what its name is now.
type Aside struct {
	Path string // where it is now; empty: it could not be moved and was left
	Kind string // "damaged", "foreign" or "newer"
	Why  error
}

func (e *Aside) Error() string {
	if e.Path == "" {
		return fmt.Sprintf("the last good state is %s and cannot be set aside: %v", e.Kind, e.Why)
	}
	return fmt.Sprintf("the last good state is %s and was set aside as %s: %v", e.Kind, e.Path, e.Why)
}

func (e *Aside) Unwrap() error { return e.Why }

// Load reads the state of that node and mesh. The error is ErrNone, or an *Aside, or
// says why the file could not be read, in which case it stays. size is the file's.
func (f *File) Load(node, domain, trustDomain string) (s *State, size int64, err error) {
	f.sweep()
	b, err := read(f.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, 0, ErrNone
	case errors.Is(err, errTooBig):
		return nil, 0, f.aside("damaged", err)
	case err != nil:
		return nil, 0, fmt.Errorf("last good state: %w: let this process read it, or remove it", err)
	}
	s, kind, err := parse(b)
	if err != nil {
		return nil, 0, f.aside(kind, err)
	}
	for _, w := range [][3]string{{"node", s.Node, node}, {"mesh domain", s.Domain, domain}, {"trust domain", s.TrustDomain, trustDomain}} {
		if w[1] != w[2] {
			return nil, 0, f.aside("foreign", fmt.Errorf("it is of the %s %q, and this is %q", w[0], w[1], w[2]))
		}
	}
	return s, int64(len(b)), nil
}

var errTooBig = fmt.Errorf("it is larger than %d MiB", maxFile>>20)

func read(path string) ([]byte, error) {
	r, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	st, err := r.Stat()
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, fmt.Errorf("%s is no regular file", path)
	case st.Size() > maxFile:
		return nil, errTooBig
	}
	var b bytes.Buffer
	b.Grow(int(st.Size()) + bytes.MinRead)
	if _, err := b.ReadFrom(io.LimitReader(r, maxFile)); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// parse is what a file holds, or of which kind its fault is.
func parse(b []byte) (s *State, kind string, err error) {
	switch {
	case len(b) < headerSize:
		return nil, "damaged", fmt.Errorf("it has %d bytes, fewer than its header", len(b))
	case string(b[:len(magic)]) != magic:
		return nil, "foreign", errors.New("it does not begin as such a file does")
	}
	h, body := b[len(magic):headerSize], b[headerSize:]
	if v := binary.BigEndian.Uint32(h); v != version {
		if v > version {
			return nil, "newer", fmt.Errorf("its version is %d, and this process knows %d", v, version)
		}
		return nil, "foreign", fmt.Errorf("its version is %d, which never was", v)
	}
	if n := binary.BigEndian.Uint64(h[4:]); n != uint64(len(body)) {
		return nil, "damaged", fmt.Errorf("it has %d bytes behind its header where %d belong", len(body), n)
	}
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:], h[12:]) {
		return nil, "damaged", errors.New("its checksum is wrong")
	}
	s = new(State)
	if err := decode(body, s); err != nil {
		if _, newer := errors.AsType[*errNewer](err); newer {
			return nil, "newer", err
		}
		return nil, "damaged", err
	}
	return s, "", nil
}

// format is a file's bytes.
func format(s *State) []byte {
	body := encode(s)
	sum := sha256.Sum256(body)
	b := make([]byte, 0, headerSize+len(body))
	b = append(b, magic...)
	b = binary.BigEndian.AppendUint32(b, version)
	b = binary.BigEndian.AppendUint64(b, uint64(len(body)))
	b = append(b, sum[:]...)
	return append(b, body...)
}

// Save makes s the file's content, or leaves the file as it was and says why. It returns
// how many bytes it wrote.
func (f *File) Save(s *State) (size int64, err error) {
	b := format(s)
	if len(b) > maxFile {
		return 0, fmt.Errorf("last good state: it would have %d MiB, more than %d", len(b)>>20, maxFile>>20)
	}
	if err := f.replace(b); err != nil {
		if p, ok := errors.AsType[*fs.PathError](err); ok { // the name of the file beside it is another each time
			err = fmt.Errorf("%s %s: %w", p.Op, f.path, p.Err)
		}
		return 0, fmt.Errorf("last good state: %w: give it a directory with room that this process may write to; the one before stays", err)
	}
	return int64(len(b)), nil
}

func (f *File) replace(b []byte) (err error) {
	dir := filepath.Dir(f.path)
	w, err := os.CreateTemp(dir, filepath.Base(f.path)+tempInfix+"*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			w.Close()
			os.Remove(w.Name())
		}
	}()
	if _, err := w.Write(b); err != nil {
		return err
	}
	if err := w.Sync(); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	if err := os.Rename(w.Name(), f.path); err != nil {
		return err
	}
	// The name is the directory's. It is in force whether or not that can be said.
	if d, err := os.Open(dir); err == nil {
		_ = d.Sync()
		d.Close()
	}
	return nil
}

const tempInfix = ".writing-"

// aside renames the file after its fault, and forgets the oldest of such.
func (f *File) aside(kind string, why error) error {
	e := &Aside{Kind: kind, Why: why}
	for i := range 1000 {
		to := fmt.Sprintf("%s.%s-%03d", f.path, kind, i)
		if _, err := os.Lstat(to); err == nil {
			continue
		}
		if err := os.Rename(f.path, to); err != nil {
			e.Why = errors.Join(why, err)
			return e
		}
		e.Path = to
		break
	}
	if e.Path == "" {
		e.Why = errors.Join(why, errors.New("there are too many of them: remove the older ones"))
	}
	f.keepNewest(e.Path)
	return e
}

// keepNewest removes all but the newest files that were set aside, and but this one.
func (f *File) keepNewest(but string) {
	var old []fs.FileInfo
	for _, kind := range []string{"damaged", "foreign", "newer"} {
		old = append(old, f.beside("."+kind+"-")...)
	}
	slices.SortFunc(old, func(a, b fs.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	for _, o := range old[min(maxAside, len(old)):] {
		if path := filepath.Join(filepath.Dir(f.path), o.Name()); path != but {
			os.Remove(path)
		}
	}
}

// beside are the files whose names are this one's and go on with infix.
func (f *File) beside(infix string) (out []fs.FileInfo) {
	entries, err := os.ReadDir(filepath.Dir(f.path))
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), filepath.Base(f.path)+infix) {
			continue
		}
		if st, err := e.Info(); err == nil && st.Mode().IsRegular() {
			out = append(out, st)
		}
	}
	return out
}

// sweep removes what a process left that ended while it wrote.
func (f *File) sweep() {
	for _, t := range f.beside(tempInfix) {
		if time.Since(t.ModTime()) > oldTemp {
			os.Remove(filepath.Join(filepath.Dir(f.path), t.Name()))
		}
	}
}
