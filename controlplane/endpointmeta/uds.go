package endpointmeta

import (
	"fmt"
	"strings"

	"aether/dataplane/model"
)

const (
	// UDSDriver is the inline csi volume that carries a pod's Unix socket; a pod has one (contract 1.7).
	UDSDriver = "csi.aether.io"
	// maxUDSPath is the longest path of a Unix socket that Linux takes, in bytes (contract 1.7; unix(7), sun_path).
	maxUDSPath = 107
)

// UDSReason says why a pod is not delivered to by the Unix socket that was asked for: a
// closed set, fit for a metric's label (contract 1.7). The zero value: it is.
type UDSReason uint8

// The reasons.
const (
	UDSFine UDSReason = iota
	UDSDisabled
	UDSBadRequest
	UDSBadFile
	UDSNoUID
	UDSVolumeNotDeclared
	UDSNotCSI
	UDSMultipleCSIVolumes
	UDSPathTooLong
	UDSReasons // how many there are
)

var udsReasons = [UDSReasons]string{
	"", "disabled", "bad_request", "bad_file", "no_uid", "volume_not_declared", "not_csi", "multiple_csi_volumes", "path_too_long",
}

// String is the reason as contract 1.7 has it.
func (r UDSReason) String() string {
	if r >= UDSReasons {
		r = UDSFine
	}
	return udsReasons[r]
}

// UDSError says why there is no Unix socket to deliver to, and how to mend it.
type UDSError struct {
	Reason UDSReason
	Text   string
}

func (e *UDSError) Error() string { return e.Text }

// SplitUDS reads "<volume>/<file>" (contract 1.7). The error's Reason is UDSBadRequest or UDSBadFile.
func SplitUDS(request string) (volume, file string, err *UDSError) {
	volume, file, cut := strings.Cut(request, "/")
	switch {
	case !cut || strings.Contains(file, "/") || !cleanSegment(volume):
		return "", "", &UDSError{UDSBadRequest, "not <volume>/<file>, two plain names with one slash between"}
	case !cleanSegment(file):
		return "", "", &UDSError{UDSBadFile, "not <volume>/<file>: the file is no plain name"}
	}
	return volume, file, nil
}

// ResolveUDS is the Unix socket of a pod for a request of the form "<volume>/<file>"
// (contract 1.7): dir/uid/file. The volume's name is in no path; it has to be the pod's
// one inline volume of UDSDriver, where volumes are known (nil: they are not, decision
// 035). uid is the pod's as the node knows it. dir empty: nobody is delivered to so.
func ResolveUDS(dir, uid string, volumes []model.Volume, request string) (*model.Socket, *UDSError) {
	if dir == "" {
		return nil, &UDSError{UDSDisabled, "delivery to Unix sockets is switched off on this node: set aether-proxy's --uds-dir"}
	}
	volume, file, err := SplitUDS(request)
	if err != nil {
		return nil, err
	}
	if !cleanSegment(uid) {
		return nil, &UDSError{UDSNoUID, "the pod's UID, which its volume's directory is named by, is not known to this node: write metadata.uid, or wait until the API server has told it"}
	}
	if err := carries(volumes, volume); volumes != nil && err != nil {
		return nil, err
	}
	if n := len(dir) + len(uid) + len(file) + 2; n > maxUDSPath {
		return nil, &UDSError{UDSPathTooLong, fmt.Sprintf("the socket's path on the node has %d bytes, and Linux takes %d: give the file a name of %d bytes at most",
			n, maxUDSPath, max(len(file)-(n-maxUDSPath), 0))}
	}
	return &model.Socket{Dir: dir, Pod: uid, File: file, Name: "unix:" + file}, nil
}

// carries: name is the one volume of UDSDriver.
func carries(volumes []model.Volume, name string) *UDSError {
	found, csi := false, 0
	ours := false
	for _, v := range volumes {
		is := v.Driver == UDSDriver
		if is {
			csi++
		}
		if v.Name == name {
			found, ours = true, is
		}
	}
	switch {
	case !found:
		return &UDSError{UDSVolumeNotDeclared, fmt.Sprintf("the pod declares no volume %.100q: name its inline csi volume of driver %s", name, UDSDriver)}
	case !ours:
		return &UDSError{UDSNotCSI, fmt.Sprintf("volume %.100q of the pod is no inline csi volume of driver %s: make it one", name, UDSDriver)}
	case csi > 1:
		return &UDSError{UDSMultipleCSIVolumes, fmt.Sprintf("the pod declares %d volumes of driver %s, and there is one directory for a pod: keep one", csi, UDSDriver)}
	}
	return nil
}
