package file

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// loader holds what a directory last said, file by file.
type loader struct {
	dir      string
	o        Options
	files    map[string]*parsed // by path below dir; what could not be read keeps its entry
	before   *Before            // what of before the start may be missing from files; nil: nothing
	told     map[string]bool    // objects, by label, that files have had since the start; nil: whole
	unread   []string           // what the last read could not read, and no read before it; ascending as listed
	whole    bool               // every file could be told once: what is missing since is kept in files
	problems []problem          // of the last read: files and directories that could not be read
}

func newLoader(dir string, o Options) *loader {
	return &loader{dir: dir, o: o.withDefaults(), files: map[string]*parsed{}, told: map[string]bool{}}
}

// read brings l up to date and reports whether anything is different. It calls
// visit, when not nil, with each directory whose entries matter, resolved,
// before it looks into it; visit's error becomes a problem. Its own error means that dir
// itself could not be listed, or ctx ended: l is then as it was.
func (l *loader) read(ctx context.Context, visit func(dir string) error) (changed bool, err error) {
	s := scan{ctx: ctx, visit: visit, old: l.files, o: l.o, files: map[string]*parsed{}, seen: map[string]bool{}, now: time.Now().UTC().Truncate(time.Second)}
	if s.visit == nil {
		s.visit = func(string) error { return nil }
	}
	root, err := filepath.EvalSymlinks(l.dir)
	if err != nil {
		return false, err
	}
	if err := s.dir("", root, 0); err != nil {
		return false, err
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	changed = !maps.Equal(s.files, l.files) || fmt.Sprint(s.problems) != fmt.Sprint(l.problems)
	l.files, l.problems, l.unread = s.files, s.problems, s.unread
	l.settle()
	return changed, nil
}

// scan is one reading of a directory.
type scan struct {
	ctx      context.Context
	visit    func(string) error
	o        Options
	old      map[string]*parsed
	files    map[string]*parsed
	seen     map[string]bool // directories, resolved: each is read once, so links cannot make a ring
	problems []problem
	unread   []string // see loader
	total    int64
	now      time.Time // to the second
}

func (s *scan) report(rel, format string, args ...any) {
	object := "file"
	if rel == "" {
		object, rel = "directory", "."
	}
	s.problems = append(s.problems, problem{Object: object, File: rel, Reason: fmt.Sprintf(format, args...)})
}

// dir reads the directory called rel below the root, which is real.
func (s *scan) dir(rel, real string, depth int) error {
	if s.seen[real] {
		return nil
	}
	s.seen[real] = true
	if depth > maxDirDepth {
		s.keep(rel)
		s.report(rel, "directories are nested deeper than %d: this one is not read; move it up", maxDirDepth)
		return nil
	}
	s.watch(rel, real)
	entries, err := os.ReadDir(real) // sorted by name
	if err != nil {
		return err
	}
	for _, e := range entries {
		if s.ctx.Err() != nil {
			return s.ctx.Err()
		}
		name := e.Name()
		if name[0] == '.' {
			continue // editors' files; and ..data, which the visible links lead through
		}
		relName, path := filepath.Join(rel, name), filepath.Join(real, name)
		info, err := os.Stat(path)
		if err != nil {
			switch {
			case !errors.Is(err, fs.ErrNotExist):
				s.keep(relName)
				s.report(relName, "cannot be read: %v: what it last said is kept; mend its permissions", err)
			case e.Type()&fs.ModeSymlink != 0:
				s.keep(relName)
				s.report(relName, "a link that leads nowhere: what was last read there is kept; correct or remove it")
			} // else: removed since the listing
			continue
		}
		if e.Type()&fs.ModeSymlink != 0 && (info.IsDir() || isYAML(name)) {
			if path, err = filepath.EvalSymlinks(path); err != nil {
				s.keep(relName)
				continue // swapped under us: an event says so
			}
		}
		switch {
		case info.IsDir():
			if err := s.dir(relName, path, depth+1); err != nil && s.ctx.Err() == nil {
				if !errors.Is(err, fs.ErrNotExist) {
					s.keep(relName)
					s.report(relName, "cannot be listed: %v: what it last said is kept; mend its permissions", err)
				}
			}
		case !isYAML(name):
		case !info.Mode().IsRegular():
			s.kept(relName)
			s.report(relName, "is no regular file and is not read: replace or rename it")
		default:
			if e.Type()&fs.ModeSymlink != 0 {
				s.watch(relName, filepath.Dir(path))
			}
			s.file(relName, path)
		}
	}
	return nil
}

// isYAML: the name ends as those do that kubectl reads; JSON is YAML (YAML 1.2, 1.3).
func isYAML(name string) bool {
	switch strings.ToLower(filepath.Ext(name)) {
	case ".yaml", ".yml", ".json":
		return true
	}
	return false
}

func (s *scan) watch(rel, real string) {
	if err := s.visit(real); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.report(rel, "cannot be watched: %v: changes are seen after up to %v; raise fs.inotify.max_user_watches", err, rescan)
	}
}

// keep holds on to what name, or everything below it, last said, or takes down that nobody knows what it says.
func (s *scan) keep(name string) {
	if !s.kept(name) {
		s.unread = append(s.unread, name)
	}
}

// kept is keep, and reports whether there was anything, of what cannot be a file of ours.
func (s *scan) kept(name string) (some bool) {
	for n, f := range s.old {
		if n == name || strings.HasPrefix(n, name+string(filepath.Separator)) {
			s.files[n], some = f, true
		}
	}
	return some
}

func (s *scan) file(rel, path string) {
	// A file that is known is not pushed out by new ones.
	if n := len(s.files); n >= maxFiles && s.old[rel] == nil || n >= 2*maxFiles {
		s.unread = append(s.unread, rel)
		s.report(rel, "more than %d files: this one is not read; put several objects into one file", maxFiles)
		return
	}
	b, err := readRegular(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return // removed since the listing
	case err != nil:
		s.keep(rel)
		s.report(rel, "cannot be read: %v: what it last said is kept; mend it", err)
		return
	}
	if s.total += int64(len(b)); s.total > maxTotal {
		s.keep(rel)
		s.report(rel, "the directory holds more than %d MiB: this file is not read; remove some", maxTotal>>20)
		return
	}
	sum := sha256.Sum256(b)
	if old := s.old[rel]; old != nil && old.sum == sum {
		s.files[rel] = old
		return
	}
	f := parse(rel, b, s.o, s.old[rel])
	f.sum = sum
	f.after(s.old[rel], s.now)
	s.files[rel] = f
}

// readRegular never waits, whatever stands at path by now.
func readRegular(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	switch info, err := f.Stat(); {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, errors.New("not a regular file")
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFileSize+1))
	if err == nil && len(b) > maxFileSize {
		err = fmt.Errorf("larger than %d MiB", maxFileSize>>20)
	}
	return b, err
}
