package reference

import (
	"slices"
	"strings"

	"aether/dataplane/model"
)

// cutQuery splits a request's target at its query, which is not part of what
// paths are compared by.
func cutQuery(target string) (path, query string) {
	path, query, _ = strings.Cut(target, "?")
	return path, query
}

const hex = "0123456789abcdefABCDEF"

// decodeOnce undoes percent-encoding once; a malformed escape stays as it is.
func decodeOnce(s string) string {
	var out []byte
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) && strings.IndexByte(hex, s[i+1]) >= 0 && strings.IndexByte(hex, s[i+2]) >= 0 {
			out = append(out, nibble(s[i+1])<<4|nibble(s[i+2]))
			i += 2
			continue
		}
		out = append(out, s[i])
	}
	return string(out)
}

func nibble(c byte) byte {
	i := byte(strings.IndexByte(hex, c))
	if i > 15 {
		i -= 6
	}
	return i
}

// normal is the path as an application may read it (decision 009).
// settled is false when four rounds of decoding do not reach an end.
func normal(path string) (out string, settled bool) {
	path = decodeAll(path)
	settled = decodeOnce(path) == path
	path = strings.ReplaceAll(path, `\`, "/")
	segments := strings.Split(path, "/")
	for i, s := range segments {
		segments[i], _, _ = strings.Cut(s, ";")
	}
	if !strings.HasPrefix(path, "/") {
		return strings.Join(segments, "/"), settled // "*", or no path at all: nothing to walk in
	}
	var kept []string
	slash := false // whether the last thing seen ends a directory
	for _, s := range segments[1:] {
		slash = true
		switch s {
		case "", ".":
		case "..":
			if len(kept) > 0 {
				kept = kept[:len(kept)-1]
			}
		default:
			kept = append(kept, s)
			slash = false
		}
	}
	out = "/" + strings.Join(kept, "/")
	if slash && len(kept) > 0 {
		out += "/"
	}
	return out, settled
}

// plainMatch: a path that is compared as text is one that normal leaves as it is
// (but for the slash at the end of a prefix), so that policy at it is met however it is spelled.
func plainMatch(m model.Match) bool {
	switch m.PathKind {
	case model.PathExact:
		if !strings.HasPrefix(m.Path, "/") {
			return true // it matches nothing
		}
		return plainText(m.Path) && !strings.HasSuffix(m.Path, "/.") && !strings.HasSuffix(m.Path, "/..")
	case model.PathPrefix:
		return plainMatch(model.Match{PathKind: model.PathExact, Path: strings.TrimRight(m.Path, "/")}) // of "/" nothing is left
	}
	return true
}

// plainPrefix is the same of an RBAC permission, whose end is no segment's.
func plainPrefix(p string) bool { return plainText(p) }

func plainText(p string) bool {
	for _, s := range []string{"%", `\`, ";", "//", "/./", "/../"} {
		if strings.Contains(p, s) {
			return false
		}
	}
	return true
}

// wanders: the path has readings beside the raw and the normal one (decision 009). An
// element is "..", however it is written: applications that decode less, or know no
// ";" or backslash, climb elsewhere than others. Or something that may be a slash stands
// behind a ";" of one raw element: who cuts before he decodes does not see it. Or it
// holds a NUL.
func wanders(path string) bool {
	whole := decodeAll(path)
	if strings.Contains(whole, "\x00") {
		return true
	}
	for _, s := range strings.Split(path, "/") {
		if _, after, ok := strings.Cut(decodeAll(s), ";"); ok && strings.ContainsAny(after, `/\`) {
			return true
		}
	}
	return slices.ContainsFunc(strings.Split(strings.ReplaceAll(whole, `\`, "/"), "/"), func(s string) bool {
		s, _, _ = strings.Cut(s, ";")
		return s == ".."
	})
}

// decodeAll undoes percent-encoding four times, the most that decision 009 looks at.
func decodeAll(s string) string {
	for range 4 {
		s = decodeOnce(s)
	}
	return s
}

// parameters of a raw query: split at "&", name and value decoded with "+" as a
// space (rules of the query match).
func parameters(query string) (out [][2]string) {
	if query == "" {
		return nil
	}
	plain := func(s string) string { return decodeOnce(strings.ReplaceAll(s, "+", " ")) }
	for _, item := range strings.Split(query, "&") {
		n, v, _ := strings.Cut(item, "=")
		out = append(out, [2]string{plain(n), plain(v)})
	}
	return out
}

// prefixed is the path with its first matched bytes replaced (Gateway API
// ReplacePrefixMatch): /p → /, /p/x → /x where the replacement is "/", and never
// two slashes at the joint. The root is no element: "/" by "/n" is "/n".
func prefixed(path string, matched int, value string) string {
	rest := path[matched:]
	if matched == 0 && path == "/" {
		rest = ""
	}
	out := strings.TrimSuffix(value, "/") + rest
	if !strings.HasPrefix(out, "/") {
		out = "/" + out
	}
	return out
}
