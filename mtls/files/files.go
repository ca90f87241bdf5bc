// Package files takes identities from files, in the layout and under the names
// that spiffe-helper writes:
//
//		<dir>/<namespace>/<account>/svid.pem         certificate chain, leaf first
//		<dir>/<namespace>/<account>/svid_key.pem     private key
//		<dir>/<namespace>/<account>/svid_bundle.pem  trust bundle
//
//	  - A change is seen by a watch on the directories, and at the latest by
//	    reading again after Config.Reread.
//	  - Three files cannot change at once. A set that does not fit together is
//	    reported once it has stayed so, and the last good one stays in force.
//	  - Nothing is written, ever.
//
// It knows nothing of who writes the files.
package files

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"aether/mtls"
	"aether/mtls/spiffeid"
)

// File names, spiffe-helper's defaults.
const (
	CertFile   = "svid.pem"
	KeyFile    = "svid_key.pem"
	BundleFile = "svid_bundle.pem"
)

// maxFile bounds what is read of one file, in bytes.
const maxFile = 1 << 20

// Config of a Source: zero fields mean what is said.
type Config struct {
	Dir    string           // required
	Settle time.Duration    // quiet time after a change before the files are read; 0: 100 ms. A writer that never rests is read after ten times that
	Reread time.Duration    // 0: 30 s: how often files are read although nothing was noticed
	Now    func() time.Time // nil: time.Now
}

// Source is an mtls.Source over a directory. Safe for concurrent use.
type Source struct {
	dir            string
	settle, reread time.Duration
	now            func() time.Time

	mu   sync.Mutex
	hub  *hub // shared by all watches: inotify instances are few; nil: none running
	uses int
}

// New returns a Source that does nothing until it is watched.
func New(c Config) *Source {
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Source{
		dir: filepath.Clean(c.Dir), settle: cmp.Or(c.Settle, 100*time.Millisecond), reread: cmp.Or(c.Reread, 30*time.Second), now: c.Now,
	}
}

// Watch is of mtls.Source. Files that are not there yet are waited for, after one error that says which.
func (s *Source) Watch(ctx context.Context, r mtls.Ref, on func(*mtls.SVID, error)) error {
	for _, part := range []string{r.Namespace, r.Account} {
		if _, err := spiffeid.ForServiceAccount("check", part, "x"); err != nil {
			return fmt.Errorf("files: %q is no name of a namespace or ServiceAccount", part) // and would be no name of a directory
		}
	}
	h, err := s.join()
	if err != nil {
		return fmt.Errorf("files: watch %s: %w", s.dir, err)
	}
	defer s.part()
	dir := filepath.Join(s.dir, r.Namespace, r.Account)
	changed := h.subscribe(dir)
	defer h.unsubscribe(dir, changed)

	var seen, said [sha256.Size]byte // digest of the set in force, and of the bad one that was reported
	told := ""
	for {
		h.watch(s.dir, filepath.Join(s.dir, r.Namespace), dir)
		svid, sum, err := s.load(dir)
		switch {
		case err == nil && (sum != seen || told != ""): // also what is in force already: nothing is wrong with it any more
			seen, told = sum, ""
			on(svid, nil)
		case err == nil:
		case err.Error() != told || sum != said:
			said, told = sum, err.Error()
			on(nil, err)
		}
		if !s.wait(ctx, changed) {
			return ctx.Err()
		}
	}
}

// wait returns when the files should be read again; false: ctx has ended.
func (s *Source) wait(ctx context.Context, changed <-chan struct{}) bool {
	again := time.NewTimer(s.reread)
	defer again.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-again.C:
		return true
	case <-changed:
	}
	quiet, enough := time.NewTimer(s.settle), time.NewTimer(10*s.settle)
	defer quiet.Stop()
	defer enough.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-quiet.C:
			return true
		case <-enough.C:
			return true
		case <-changed:
			quiet.Reset(s.settle)
		}
	}
}

// load reads the three files and makes an SVID of them. sum is of what was read.
func (s *Source) load(dir string) (_ *mtls.SVID, sum [sha256.Size]byte, _ error) {
	digest := sha256.New()
	var data [3][]byte
	for i, name := range [...]string{CertFile, KeyFile, BundleFile} {
		b, err := read(filepath.Join(dir, name))
		if err != nil {
			return nil, sum, fmt.Errorf("files: %w", err)
		}
		data[i] = b
		fmt.Fprintf(digest, "%d ", len(b))
		digest.Write(b)
	}
	digest.Sum(sum[:0])
	pair, err := tls.X509KeyPair(data[0], data[1])
	if err != nil {
		return nil, sum, fmt.Errorf("files: %s: %s and %s: %w", dir, CertFile, KeyFile, err)
	}
	authorities, err := parseBundle(data[2])
	if err != nil {
		return nil, sum, fmt.Errorf("files: %s: %w", filepath.Join(dir, BundleFile), err)
	}
	svid, err := mtls.NewSVID(pair, authorities, s.now())
	if err != nil {
		return nil, sum, fmt.Errorf("files: %s: %w", dir, err)
	}
	return svid, sum, nil
}

// parseBundle takes every certificate or nothing: a bundle cut short would
// quietly distrust half of the mesh.
func parseBundle(b []byte) ([]*x509.Certificate, error) {
	var all []*x509.Certificate
	for {
		var block *pem.Block
		block, rest := pem.Decode(b)
		if block == nil {
			break
		}
		b = rest
		c, err := x509.ParseCertificate(block.Bytes)
		if block.Type != "CERTIFICATE" || err != nil {
			return nil, fmt.Errorf("block %d is no certificate (%s): %w", len(all)+1, block.Type, cmp.Or(err, errors.New("wrong type")))
		}
		all = append(all, c)
	}
	if len(all) == 0 || bytes.Contains(b, []byte("-----BEGIN")) {
		return nil, fmt.Errorf("the bundle is empty or cut short after %d certificates", len(all))
	}
	return all, nil
}

func read(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxFile {
		return nil, fmt.Errorf("%s: more than %d bytes", name, maxFile)
	}
	return b, nil
}

// join returns the hub that all watches share, which runs while there is one.
func (s *Source) join() (*hub, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hub == nil {
		h, err := newHub()
		if err != nil {
			return nil, err
		}
		s.hub = h
	}
	s.uses++
	return s.hub, nil
}

func (s *Source) part() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.uses--; s.uses == 0 {
		s.hub.close()
		s.hub = nil
	}
}

// hub spreads the events of one inotify instance over the watches they concern.
type hub struct {
	w    *fsnotify.Watcher
	done chan struct{} // closed when the goroutine has ended

	dirs sync.Mutex // held while watched directories change; taken before mu
	mu   sync.Mutex
	subs map[chan struct{}]string // each told of what happens in or above its directory
}

func newHub() (*hub, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	h := &hub{w: w, done: make(chan struct{}), subs: map[chan struct{}]string{}}
	go h.run()
	return h, nil
}

func (h *hub) run() {
	defer close(h.done)
	for {
		select {
		case e, ok := <-h.w.Events:
			if !ok {
				return
			}
			h.tell(e.Name)
		case _, ok := <-h.w.Errors:
			if !ok {
				return
			}
			h.tell("") // events were lost: everybody reads again
		}
	}
}

// tell wakes the watches that a change of name concerns; "": all.
func (h *hub) tell(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ch, dir := range h.subs {
		if name == "" || name == dir || filepath.Dir(name) == dir || name == filepath.Dir(dir) {
			select {
			case ch <- struct{}{}:
			default: // told already
			}
		}
	}
}

func (h *hub) subscribe(dir string) chan struct{} {
	ch := make(chan struct{}, 1)
	h.mu.Lock()
	h.subs[ch] = dir
	h.mu.Unlock()
	return ch
}

func (h *hub) unsubscribe(dir string, ch chan struct{}) {
	h.dirs.Lock()
	defer h.dirs.Unlock()
	h.mu.Lock()
	delete(h.subs, ch)
	shared := false
	for _, d := range h.subs {
		shared = shared || d == dir
	}
	h.mu.Unlock() // events flow while inotify is asked
	if !shared {
		h.w.Remove(dir) // may not be watched, or be gone
	}
}

// watch adds the directories that exist, outermost first. Those that do not are
// added once their parent tells of them; what goes wrong is mended by rereading.
func (h *hub) watch(dirs ...string) {
	h.dirs.Lock()
	defer h.dirs.Unlock()
	for _, d := range dirs {
		if h.w.Add(d) != nil {
			return
		}
	}
}

func (h *hub) close() {
	h.w.Close()
	<-h.done
}
