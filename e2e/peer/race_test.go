//go:build race

package peer

func init() { buildFlags = append(buildFlags, "-race") }
